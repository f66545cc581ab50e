"""Calibrations derived from others: for GPUs without one, by data sheets, and for measured base engines."""

from __future__ import annotations

import re

from backends.calibration.base_engines import GRAPH_TOKENS, base_engines, base_models
from backends.calibration.calibration import Calibration, Measured, MethodCalibration, StepTime
from backends.calibration.gpus import Gpu, Precision, gpus
from backends.speculation import MODELLESS, Method

_LARGE_GIB = 70
"""GPUs with at least this memory get large batches from vLLM, except A100 (engine/arg_utils.py of 0.32)."""

_OTHER_PRECISION = " (another precision: off by 45.7% in the median, up to 130%)"
"""TPOT of other versions of the engine, as `python -m benchmarks.calibration scaled TABLE` prints it."""

_UNSPLIT_LAYER_S, _LAYER_KIB = 45e-9, 4
"""`StepTime.per_unsplit_token_s` of a layer, and its KV cache, with 8 heads of 128 as in Llama and Qwen.

1.4 ms for 31,000 tokens on an RTX 3090 Ti: github.com/vllm-project/flash-attention pull request 190.
"""

_GPU_RESERVED_GIB = 3.0  # for activations and graphs; our estimate
_SOURCE = "fitted to TPOT of {} in ai-dynamo/aiconfigurator, silicon_sample.csv at 095f58a (Apache-2.0)"


def scaled(calibration: Calibration, gpu: str, precision: str = "bf16") -> Calibration:
    """Return a calibration for the same number of GPUs of another kind, with weights of a precision.

    Memory reads (weights, drafts, context) scale with bandwidth and bytes, computation with FLOP/s; the host's work
    does not scale. `python -m benchmarks.calibration scaled TABLE` prints the error.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> fast = scaled(load_calibration("llama-3.1-8b-h100"), "B200", "fp8")
    >>> fast.hardware, fast.precision.value, fast.memory.weights_gib
    ('1x B200', 'fp8', 7.48)
    """
    number, source = _machine(calibration)
    target, wanted = _known(gpu), _precision(precision)
    bandwidth = source.bandwidth_tb_s / target.bandwidth_tb_s
    smaller = wanted.bytes_per_weight / calibration.precision.bytes_per_weight
    compute = source.tflops[calibration.precision] / target.tflops[wanted]
    attention = source.tflops[Precision.BF16] / target.tflops[Precision.BF16]
    step, memory = calibration.step, calibration.memory
    unsplit_s = _UNSPLIT_LAYER_S * memory.kv_kib_per_token / _LAYER_KIB
    # At the knee reading takes as long as computing, unless the knee is where all experts are read or the graphs end.
    waking = step.per_token_below_knee_s > step.per_token_above_knee_s
    knee_tokens = (
        step.knee_tokens if waking or step.graph_tokens else round(step.knee_tokens * bandwidth * smaller / compute)
    )
    waking_tokens = step.knee_tokens if waking and not step.graph_tokens else 0
    experts_s = step.experts_s + waking_tokens * step.per_token_below_knee_s
    all_weights_s = memory.weights_gib * 2**30 / (number * source.bandwidth_tb_s * 1e12)
    read_s = min(step.base_s, max(0.0, all_weights_s - experts_s))
    large = target.gib >= _LARGE_GIB and not target.name.startswith("A100")
    return calibration.model_copy(
        update={
            "name": f"{calibration.name}-on-{target.name.lower()}-{wanted}",
            "hardware": f"{number}x {target.name}",
            "precision": wanted,
            "measured": calibration.measured
            and Measured(
                engine=calibration.measured.engine,
                scaled_from=f"{source.name} in {calibration.precision}" + _OTHER_PRECISION * (smaller != 1.0),
            ),
            "step": step.model_copy(
                update={
                    "base_s": step.base_s - read_s + read_s * bandwidth * smaller,
                    "experts_s": step.experts_s * bandwidth * smaller,
                    "knee_tokens": knee_tokens,
                    "per_token_below_knee_s": step.per_token_below_knee_s
                    * (bandwidth * smaller if waking else compute),
                    "per_token_above_knee_s": step.per_token_above_knee_s * compute,
                    "per_context_token_s": step.per_context_token_s * bandwidth,
                    "per_attended_s": step.per_attended_s * attention,
                    "per_unsplit_token_s": 0.0 if target.splits_context else step.per_unsplit_token_s or unsplit_s,
                    "source": f"{calibration.name}'s, scaled from {source.name} in {calibration.precision}",
                }
            ),
            "memory": memory.model_copy(
                update={"gpu_gib": number * target.gib, "weights_gib": memory.weights_gib * smaller}
            ),
            "scheduler": calibration.scheduler.model_copy(
                update={"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
                if large
                else {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
            ),
            "methods": {
                method: _drafts(method, each, bandwidth, number * source.bandwidth_tb_s)
                for method, each in calibration.methods.items()
            },
        }
    )


def base_calibration(name: str, like: Calibration) -> Calibration:
    """Return the calibration of a base engine, with the methods of another machine's calibration."""
    engine = base_engines()[name]
    model, weights, gpu = base_models()[engine.model], Precision(engine.precision), gpus()[engine.gpu.lower()]
    like = scaled(like.model_copy(update={"methods": like.taken_by_others()}), engine.gpu, weights)
    stated = engine.engine if " " in engine.engine else f"{engine.engine}, version not stated"
    step = StepTime(
        **{field: value for field, value in engine._asdict().items() if field.endswith("_s")},
        expert_share=model.expert_share,
        knee_tokens=GRAPH_TOKENS,
        graph_tokens=GRAPH_TOKENS,
        overhead_s=0.0,
        source=_SOURCE.format(engine.engine),
    )
    memory = {
        "gpu_gib": engine.gpus * gpu.gib,
        "reserved_gib": engine.gpus * _GPU_RESERVED_GIB,
        "weights_gib": model.parameters_b * 1e9 * weights.bytes_per_weight / 2**30,
        "kv_kib_per_token": model.kv_kib_per_token * (engine.gpus if model.latent_kv else 1),
        "source": "the model's shape; 0.9 is vLLM's default; 3 GiB a GPU for activations and graphs is our estimate",
    }
    return like.model_copy(
        update={
            "name": name,
            "target": model.target,
            "hardware": f"{engine.gpus}x {engine.gpu}",
            "measured": Measured(engine=stated, figures=engine.figures, error=engine.error, most=engine.most),
            "step": step,
            "memory": like.memory.model_copy(update={**memory, "utilization": 0.9}),
            "scheduler": like.scheduler.model_copy(update={"max_model_len": model.max_model_len}),
        }
    )


def _drafts(method: Method, entry: MethodCalibration, slower: float, bandwidth_tb_s: float) -> MethodCalibration:
    """Return a method's calibration for another bandwidth.

    Reads of the drafter's weights and context scale with it. The rest of a pass is kernel launches and host work, as is
    all of a lookup.
    """
    if method in MODELLESS:
        return entry
    drafting = entry.drafting
    read_s = min(drafting.per_pass_s, entry.weights_gib * 2**30 / (bandwidth_tb_s * 1e12))
    times = {
        "base_s": drafting.base_s,
        "per_pass_s": drafting.per_pass_s + read_s * (slower - 1),
        "per_context_token_s": drafting.per_context_token_s * slower,
    }
    return entry.model_copy(update={"drafting": drafting.model_copy(update=times)})


def _machine(calibration: Calibration) -> tuple[int, Gpu]:
    """Return the number and the kind of a calibration's GPUs."""
    machine = re.match(r"(\d+)x ([\w-]+)", calibration.hardware)
    if not machine:
        raise ValueError(
            f"calibration {calibration.name!r} cannot be scaled: its hardware is {calibration.hardware!r}, not like "
            "'2x H200'"
        )
    return int(machine[1]), _known(machine[2])


def _known(gpu: str) -> Gpu:
    if gpu.lower() not in gpus():
        raise ValueError(f"no data sheet of a GPU {gpu!r}; known: {', '.join(each.name for each in gpus().values())}")
    return gpus()[gpu.lower()]


def _precision(precision: str) -> Precision:
    if precision not in set(Precision):
        raise ValueError(f"no precision is called {precision!r}; known: {', '.join(Precision)}")
    return Precision(precision)
