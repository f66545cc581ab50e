"""Measured base engines, calibrations by names like `h200/llama-3.1-70b/fp8`: step times without speculation.

base_engines.csv holds them, fitted by `python -m benchmarks.calibration base` to TPOT in silicon_sample.csv of
ai-dynamo/aiconfigurator at 095f58a (Apache-2.0); base_models.csv holds the shapes of the models. All else comes from
another calibration, scaled to the GPU.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import Final, NamedTuple, TypeVar, get_type_hints

GRAPH_TOKENS: Final = 512
"""The largest captured graph; steps with more tokens compute prompts."""

_Row = TypeVar("_Row", "BaseModel", "BaseEngine")


class BaseModel(NamedTuple):
    """The shape of a model."""

    model: str
    target: str
    parameters_b: float
    active_b: float
    experts_b: float
    expert_share: float  # of a layer's experts that a token chooses
    kv_kib_per_token: float
    latent_kv: int  # whether each GPU holds all of it
    pair_mflop: float  # of attention, for a prompt token and one before it
    max_model_len: int
    like: str  # the calibration that supplies all else


class BaseEngine(NamedTuple):
    """An engine's step times; those in seconds are fields of `StepTime`."""

    name: str
    model: str
    engine: str
    gpu: str
    gpus: int
    precision: str
    base_s: float
    experts_s: float
    per_token_below_knee_s: float
    per_token_above_knee_s: float
    per_context_token_s: float
    no_graph_s: float
    per_attended_s: float
    rows: int
    figures: int  # held out; `error` and `most` are over these, as in `Measured`
    error: float
    most: float


def _rows(name: str, kind: type[_Row]) -> dict[str, _Row]:
    """Return the rows of one of the package's tables, keyed by their first column."""
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
