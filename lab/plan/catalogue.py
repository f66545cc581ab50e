"""Catalogue of GPUs, target models and drafts, with the shapes that determine their memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.speculation import Method
from backends.validation import did_you_mean


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1)


class Gpu(_Entry):
    """A GPU."""

    title: str  # name in texts
    memory_mib: int = Field(gt=0)  # as the driver reports it

    @property
    def memory_gib(self) -> float:
        """Total memory in GiB."""
        return self.memory_mib / 1024


class Shape(_Entry):
    """A model, and the dimensions that determine its memory."""

    names: tuple[str, ...] = Field(min_length=1)  # under which it is published, the usual one first
    parameters: int = Field(gt=0)
    layers: int = Field(ge=0)  # of attention
    kv_heads: int = Field(ge=0)
    head_dim: int = Field(ge=0)


class Draft(Shape):
    """A draft model or head; `targets` are the short names of the targets that it drafts for."""

    method: Method
    targets: tuple[str, ...] = Field(min_length=1)


class Catalogue(BaseModel):
    """GPUs, targets and drafts by short name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: Mapping[str, Gpu]
    targets: Mapping[str, Shape]
    drafts: Mapping[str, Draft]

    @model_validator(mode="after")
    def _drafts_have_targets(self) -> Catalogue:
        for name, draft in self.drafts.items():
            for target in draft.targets:
                if target not in self.targets:
                    raise ValueError(f"{name} drafts for {target}, which is not in the catalogue")
        return self


@cache
def catalogue() -> Catalogue:
    """Load the catalogue of the package."""
    file = resources.files("lab.plan").joinpath("catalogue.yaml")
    return Catalogue.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))


def gpu(name: str) -> Gpu:
    """Return a GPU by its name, in any case."""
    known = catalogue().gpus
    if name.lower() not in known:
        raise ValueError(f"no such GPU: {name!r}; {did_you_mean(name.lower(), known)}")
    return known[name.lower()]


def target(name: str) -> Shape | None:
    """Return a target by its short or a published name, in any case; None if it is unknown.

    Examples
    --------
    >>> target("meta-llama/Llama-3.1-8B-Instruct") is target("llama-3.1-8b")
    True
    """
    short = _short_name(name)
    return None if short is None else catalogue().targets[short]


def draft(target: str, method: Method) -> Draft | None:
    """Return the published draft of a target for a method; None for a method without one.

    Examples
    --------
    >>> draft("llama-3.1-8b", Method.EAGLE3).names
    ('yuhuili/EAGLE3-LLaMA3.1-Instruct-8B',)
    """
    short = _short_name(target)
    drafts = catalogue().drafts.values()
    return next((one for one in drafts if one.method is method and short in one.targets), None)


def _short_name(name: str) -> str | None:
    lowered = name.lower()
    for short, entry in catalogue().targets.items():
        if lowered == short or lowered in {published.lower() for published in entry.names}:
            return short
    return None
