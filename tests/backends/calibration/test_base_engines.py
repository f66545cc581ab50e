"""Calibrations of measured base engines."""

from __future__ import annotations

import numpy as np
import pytest

from backends.calibration.base_engines import base_engines
from backends.calibration.load import load_calibration
from backends.drafting.script import Script, plain_steps
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.speculation import Method
from benchmarks.virtual_time import run_closed_loop


@pytest.mark.parametrize("name", base_engines())
def test_a_base_engine_loads_by_its_name_and_holds_long_requests(name: str) -> None:
    calibration, engine = load_calibration(name), base_engines()[name]
    assert (calibration.name, calibration.precision) == (name, engine.precision)
    assert calibration.hardware == f"{engine.gpus}x {engine.gpu}"
    assert calibration.kv_tokens(Method.BASELINE) > 8192
    assert set(calibration.methods) == set(Method)
    assert calibration.acceptance(Method.EAGLE3, "code").by_position


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prompt", "answer", "clients", "measured_ms"),
    [  # of silicon_sample.csv, ai-dynamo/aiconfigurator at 095f58a (Apache-2.0)
        ("h200/llama-3.1-70b/fp8", 1024, 1024, 4, 21.47),
        ("h200/llama-3.1-70b/fp8", 8192, 1024, 16, 47.48),
        ("4xh100/qwen3-32b/bf16", 4096, 512, 16, 15.43),
        ("4xb300/minimax-m2.5/fp8", 1024, 1024, 32, 12.10),
        ("2xb200/gpt-oss-120b/fp4", 8192, 1024, 64, 9.62),
    ],
)
def test_a_simulated_base_engine_takes_as_long_as_the_measured_one(
    name: str, prompt: int, answer: int, clients: int, measured_ms: float
) -> None:
    rng = np.random.default_rng(1)
    spread = rng.uniform(0.8, 1.2, (4 * clients, 2))
    scripts = [Script(int(prompt * p), int(answer * a), *plain_steps(int(answer * a))) for p, a in spread]
    timeline = run_closed_loop(
        Fleet([SimulatedReplica("a", load_calibration(name), Method.BASELINE)]), scripts, clients
    )
    assert 1e3 * float(np.nanmean(timeline.tpot_s)) == pytest.approx(measured_ms, rel=0.08)


def test_an_unknown_base_engine_is_answered_with_a_near_name() -> None:
    with pytest.raises(ValueError, match=r"no calibration is called 'h200/llama-3.1-70b/fp9'.*h200/llama-3.1-70b/fp8"):
        load_calibration("h200/llama-3.1-70b/fp9")


def test_a_base_engine_is_scaled_too() -> None:
    slow, fast = (load_calibration(f"b200/gpt-oss-120b/fp4{at}") for at in ("@H200", ""))
    assert slow.step.experts_s / fast.step.experts_s == pytest.approx(8.0 / 4.8)
    assert slow.step.knee_tokens == slow.step.graph_tokens == fast.step.graph_tokens
