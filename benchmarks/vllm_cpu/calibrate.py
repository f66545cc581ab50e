"""Writing of the fitted calibration, with a source for each number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from backends.calibration.calibration import Calibration
from backends.speculation import Method
from benchmarks.vllm_cpu.fit import FITTED, fit
from benchmarks.vllm_cpu.measure import Cell

TEMPLATE = Path(__file__).with_name("template.yaml")
_HEAD = """\
# Tiny models on one core of a CPU, vLLM 0.32: what config/pool.vllm-cpu.yaml runs. Written by
#   python -m benchmarks.vllm_cpu fit
# from benchmarks/vllm_cpu/measured.json.xz, which `python -m benchmarks.vllm_cpu measure` writes. How well it
# predicts: docs/simulator.md.
"""
_DIGITS = 4
_LOOPS = f"TPOT of closed loops at {' and '.join(map(str, FITTED))} concurrent requests"


def fitted_document(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the calibration document: the template with the fitted numbers."""
    document: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    calibration = fit(cells, Calibration.model_validate(document))
    step = calibration.step.model_dump(exclude={"source"}, exclude_defaults=True)
    step = {name: value if name == "knee_tokens" else _rounded(value) for name, value in step.items()}
    document["step"] = {**step, "source": f"baseline: {_LOOPS}; per token above the knee from TTFT of single prompts"}
    for method, entry in calibration.methods.items():
        written = document["methods"][method.value]
        source = {Method.BASELINE: "drafts nothing"}.get(method, f"{method}: {_LOOPS}, less the step time")
        costs = entry.drafting.model_dump(exclude={"source"}, exclude_defaults=True)
        if written["drafting"]["source"] == "like:eagle":
            costs = calibration.methods[Method.EAGLE].drafting.model_dump(exclude={"source"}, exclude_defaults=True)
            source = "not measured; taken as EAGLE's"
        written["drafting"] = {**{name: _rounded(value) for name, value in costs.items()}, "source": source}
        for kind, acceptance in entry.acceptance.items():
            of_kind = {"by_position": list(acceptance.by_position), "request_spread": acceptance.request_spread}
            source = f"{method}: counted by vLLM in those loops, greedy, prompts from Python's standard library"
            written["acceptance"][kind.value] = {**of_kind, "source": source}
    return document


def write(path: Path, cells: Sequence[Cell]) -> None:
    """Fit and write a calibration."""
    text = yaml.dump(fitted_document(cells), Dumper=_Plain, sort_keys=False, width=110)
    path.write_text(_HEAD + text, encoding="utf-8")


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


class _Plain(yaml.SafeDumper):
    """Dumper without aliases: writes every value in place."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
