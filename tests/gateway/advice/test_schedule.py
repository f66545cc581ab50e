"""The advised schedule gains in the simulator what was stated; nothing is advised where there is no support."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml

from backends.calibration.calibration import load_calibration
from backends.engine_metrics import EngineMetrics
from backends.occupancy import Occupancy
from backends.simulator.engine.fleet import Fleet, Replica
from backends.speculation import Method, SpeculativeConfig
from gateway.advice.advise import advise
from gateway.advice.evidence import BackendEvidence, ModelEvidence, Steps
from gateway.advice.finding import Finding
from gateway.advice.gather import positions_of
from gateway.advice.schedule import schedule
from policies.learned.models.prior import expected_step

CALIBRATION = "llama-3-70b-2xh200"
CONFIG = {"num_speculative_tokens": 5}
PROMPT, PHASES = 100, (0.5, 14.0) * 2
PHASE_S = 600.0


def play(config: dict[str, Any], phases: tuple[float, ...] = PHASES) -> tuple[float, BackendEvidence]:
    """Return the mean seconds per output token of ten-minute phases at different rates, and what probes saw."""
    rng = np.random.default_rng(5)
    fleet = Fleet([Replica("head", load_calibration(CALIBRATION), Method.EAGLE3, config)], 1)
    counts = [round(PHASE_S * rate) for rate in phases]
    arrivals = np.concatenate([np.sort(rng.uniform(0, PHASE_S, count)) + n * PHASE_S for n, count in enumerate(counts)])
    lengths = rng.integers(60, 240, len(arrivals)).tolist()
    occupancy, done, next_probe_s = Occupancy(), [], 2.0
    for at_s, output in zip(arrivals.tolist(), lengths, strict=True):
        while next_probe_s < at_s:
            done += fleet.advance(next_probe_s)
            load = fleet.replicas[0].report(next_probe_s)
            occupancy.add(EngineMetrics(running=load.running, waiting=load.waiting, kv_usage=load.kv_usage))
            next_probe_s += 2.0
        done += fleet.advance(at_s)
        fleet.submit(0, PROMPT, output, at_s, kind="chat")
    done += fleet.advance(math.inf)
    counters = fleet.counters()
    mean_batch = sum(minute.running for minute in occupancy.minutes) / 30 / len(occupancy.minutes)
    mean_load = (1.0, mean_batch, mean_batch * (PROMPT + 80) / 1e3, 1.0)
    evidence = BackendEvidence(
        "head",
        Method.EAGLE3,
        5,
        answers=float(len(done)),
        steps=Steps(float(len(done)), 0.03, mean_load, expected_step(CALIBRATION, Method.EAGLE3, 5)),
        positions=positions_of(counters.drafts, counters.accepted_at.tolist()),
        calibration=CALIBRATION,
        minutes=tuple(occupancy.minutes),
        speculative_config=config,
    )
    mean_s = sum(one.ended_s - one.first_s for one in done) / sum(one.output_tokens - 1 for one in done)
    return mean_s, evidence


def advised(finding: Finding) -> dict[str, Any]:
    backends = yaml.safe_load(finding.change)["models"]["m"]["backends"]
    config: dict[str, Any] = backends["head"]["speculative_config"]
    return config


@pytest.fixture(scope="module")
def played() -> tuple[float, BackendEvidence]:
    return play(CONFIG)


def of(backend: BackendEvidence) -> ModelEvidence:
    return ModelEvidence("m", (backend,))


def test_the_advised_schedule_gains_what_was_stated(played: tuple[float, BackendEvidence]) -> None:
    before_s, evidence = played
    [finding] = advise(of(evidence))
    assert finding.rule == "schedule"
    config = advised(finding)
    SpeculativeConfig.model_validate(config)
    after_s, _ = play(config)
    assert finding.gain is not None
    assert finding.gain.low <= 1 - after_s / before_s <= finding.gain.high
    assert "one k for all: k = 2 would save" in finding.evidence


def test_nothing_is_advised_without_support(played: tuple[float, BackendEvidence]) -> None:
    _, evidence = played
    assert evidence.positions is not None
    for without in (
        replace(evidence, answers=99.0),
        replace(evidence, minutes=evidence.minutes[:9]),
        replace(evidence, method=Method.SUFFIX),
        replace(evidence, speculative_config={**CONFIG, "num_speculative_tokens_per_batch_size": [[1, 9, 5]]}),
        replace(evidence, positions=replace(evidence.positions, drafts=1999)),
        replace(evidence, is_silent=True),
    ):
        assert schedule(of(without)) == []


def test_nothing_is_advised_at_a_small_load() -> None:
    _, evidence = play({"num_speculative_tokens": 5}, (0.5, 0.7))
    assert schedule(of(evidence)) == []
