"""Reading of all sources."""

from __future__ import annotations

from pathlib import Path

from benchmarks.calibration import facts, specforge, sweeps, transcribed, vllm_metrics
from benchmarks.calibration.cases import Collected


def collect(facts_folder: Path, data: Path) -> Collected:
    """Return the published figures and the measured data.

    Parameters
    ----------
    facts_folder
        Directory with serving_online.csv, throughput_offline.csv and the other tables of published figures.
    data
        Directory with transcribed, vllm012_metrics, specforge_bundle, specdecode_bench and prompts.
    """
    collected = facts.read(facts_folder)
    collected += transcribed.read(data / "transcribed")
    collected += vllm_metrics.read(data / "vllm012_metrics")
    collected += specforge.read(data / "specforge_bundle" / "data.json")
    collected += sweeps.read()
    return collected
