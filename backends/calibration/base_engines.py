"""Calibrations of measured base engines, by names like `h200/llama-3.1-70b/fp8`: step times without speculation.

base_engines.csv has them, fitted by `python -m benchmarks.calibration base` to TPOT in silicon_sample.csv of
ai-dynamo/aiconfigurator at 095f58a (Apache-2.0); base_models.csv the shapes of the models. Drafting and acceptance are
those of another calibration, scaled to the GPU.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

from backends.calibration.gpus import Precision, gpus

GRAPH_TOKENS: Final = 512
"""The largest captured graph; steps with more tokens compute prompts."""

_SOURCE: Final = "fitted to TPOT of {engine} in ai-dynamo/aiconfigurator, silicon_sample.csv at 095f58a (Apache-2.0)"
_Row = TypeVar("_Row", "BaseModel", "BaseEngine")


class BaseModel(NamedTuple):
    """The shape of a model."""

    model: str
    target: str
    parameters_b: float
    active_b: float
    experts_b: float
    expert_share: float  # of a layer's experts, that a token chooses
    kv_kib_per_token: float
    latent_kv: int  # whether each GPU holds all of it
    max_model_len: int
    like: str  # the calibration whose methods it takes


class BaseEngine(NamedTuple):
    """Step times of an engine; see `StepTime`."""

    name: str
    model: str
    engine: str
    gpu: str
    gpus: int
    precision: str
    base_ms: float
    experts_ms: float
    per_token_us: float
    per_prompt_token_us: float
    per_context_token_us: float
    no_graph_ms: float
    rows: int


def _rows(name: str, kind: type[_Row]) -> dict[str, _Row]:
    """Return the rows of a table of the package by their first column."""
    text = resources.files("backends.calibration").joinpath(name).read_text(encoding="utf-8")
    types = get_type_hints(kind)
    rows = [kind(**{key: types[key](value) for key, value in row.items()}) for row in csv.DictReader(text.splitlines())]
    return {row[0]: row for row in rows}


@cache
def base_models() -> dict[str, BaseModel]:
    """Return the shapes of models by name."""
    return _rows("base_models.csv", BaseModel)


@cache
def base_engines() -> dict[str, BaseEngine]:
    """Return the measured base engines by name."""
    return _rows("base_engines.csv", BaseEngine)


def base_document(name: str) -> dict[str, Any]:
    """Return what a calibration's YAML file would hold."""
    engine = base_engines()[name]
    model, source = base_models()[engine.model], _SOURCE.format(engine=engine.engine)
    gpu, weight_bytes = gpus()[engine.gpu.lower()], Precision(engine.precision).bytes_per_weight
    return {
        "target": model.target,
        "hardware": f"{engine.gpus}x {engine.gpu}",
        "precision": engine.precision,
        "step": {
            "base_s": engine.base_ms * 1e-3,
            "experts_s": engine.experts_ms * 1e-3,
            "expert_share": model.expert_share,
            "knee_tokens": GRAPH_TOKENS,
            "per_token_below_knee_s": engine.per_token_us * 1e-6,
            "per_token_above_knee_s": engine.per_prompt_token_us * 1e-6,
            "per_context_token_s": engine.per_context_token_us * 1e-6,
            "overhead_s": 0.0,
            "graph_tokens": GRAPH_TOKENS,
            "no_graph_s": engine.no_graph_ms * 1e-3,
            "source": source,
        },
        "memory": {
            "gpu_gib": engine.gpus * gpu.gib,
            "utilization": 0.9,
            "reserved_gib": 3.0 * engine.gpus,
            "weights_gib": model.parameters_b * 1e9 * weight_bytes / 2**30,
            "kv_kib_per_token": model.kv_kib_per_token * (engine.gpus if model.latent_kv else 1),
            "source": "the model's shape; 0.9 is vLLM's default; 3 GiB for activations and graphs is our estimate",
        },
        "scheduler": {
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 8192,
            "max_model_len": model.max_model_len,
            "source": "vLLM's defaults for GPUs with 70 GiB or more; the model's context",
        },
        "methods": {"baseline": {"drafting": {"source": "drafts nothing"}}},
        "methods_from": f"{model.like}@{engine.gpu}",
    }
