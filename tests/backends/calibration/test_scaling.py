"""Calibrations for GPUs without one."""

from __future__ import annotations

import pytest

from backends.calibration.base_engines import base_engines
from backends.calibration.calibration import Calibration, Drafting
from backends.calibration.files import calibration_names
from backends.calibration.gpus import gpus
from backends.calibration.load import load_calibration
from backends.calibration.scaling import scaled
from backends.speculation import Method

GPU_CALIBRATIONS = [load_calibration(name) for name in calibration_names() if name != "tiny-cpu"]


@pytest.mark.parametrize("calibration", GPU_CALIBRATIONS, ids=lambda each: each.name)
def test_a_gpu_scaled_to_another_and_back_is_as_before(calibration: Calibration) -> None:
    back = scaled(scaled(calibration, "L40S", "fp8"), calibration.hardware.split()[1].strip(","), calibration.precision)
    for before, after in ((calibration.step, back.step), *zip(drafting(calibration), drafting(back), strict=True)):
        kept = {key: value for key, value in before if key not in ("source", "knee_tokens", "unmeasured_ms")}
        assert {key: value for key, value in after if key in kept} == pytest.approx(kept)
    assert back.step.knee_tokens == pytest.approx(calibration.step.knee_tokens, abs=1)


@pytest.mark.parametrize("gpu", [each.name for each in gpus().values()])
def test_less_bandwidth_never_makes_a_step_shorter_and_fewer_bytes_never_longer(gpu: str) -> None:
    h100 = load_calibration("llama-3.1-8b-h100")
    of_gpu, bf16, fp8 = gpus()[gpu.lower()], scaled(h100, gpu), scaled(h100, gpu, "fp8")
    slower = of_gpu.bandwidth_tb_s < gpus()["h100"].bandwidth_tb_s
    assert (bf16.step.base_s > h100.step.base_s) == slower
    assert bf16.method(Method.EAGLE3).drafting.per_pass_s > 0
    assert fp8.step.base_s < bf16.step.base_s
    assert "another precision: off by 45.7% in the median" in str(fp8.measured)
    assert "another precision" not in str(bf16.measured)
    assert fp8.kv_tokens(Method.BASELINE) > bf16.kv_tokens(Method.BASELINE)


@pytest.mark.parametrize("name", [name for name, each in base_engines().items() if not each.experts_s])
def test_a_step_of_a_dense_model_takes_as_long_as_reading_its_weights(name: str) -> None:
    engine = load_calibration(name)
    number = int(engine.hardware.partition("x")[0])
    for gpu in gpus().values():
        there = scaled(engine, gpu.name, engine.precision)
        assert there.step.base_s > 0.8 * there.memory.weights_gib * 2**30 / (number * gpu.bandwidth_tb_s * 1e12)


@pytest.mark.parametrize(
    ("calibration", "gpu", "precision", "message"),
    [
        ("llama-3.1-8b-h100", "H1000", "bf16", "no data sheet of a GPU 'H1000'; known: A10, A100"),
        ("llama-3.1-8b-h100", "A100", "fp9", "no precision is called 'fp9'; known: bf16, fp8"),
        ("tiny-cpu", "A100", "bf16", "its hardware is 'one core of a CPU', not like '2x H200'"),
    ],
)
def test_what_cannot_be_scaled_is_said(calibration: str, gpu: str, precision: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        scaled(load_calibration(calibration), gpu, precision)


def drafting(calibration: Calibration) -> list[Drafting]:
    """Return the drafting costs of all methods, in a fixed order."""
    return [calibration.methods[method].drafting for method in sorted(calibration.methods)]
