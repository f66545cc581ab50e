"""GPUs, target models and drafts by name, with the shapes that their memory follows from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.speculation import Method
from backends.validation import did_you_mean

WITHOUT_DRAFT = frozenset({Method.BASELINE, Method.NGRAM, Method.SUFFIX})
"""Methods that keep nothing on the GPU but the target."""

_EAGLE3_VOCABULARY = 32_000  # of the draft's own, smaller output layer, as published heads have it


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1)


class Gpu(_Entry):
    """A GPU; `memory_mib` is all of its memory, as the driver reports it."""

    title: str
    memory_mib: int = Field(gt=0)

    @property
    def memory_gib(self) -> float:
        """All of its memory in GiB."""
        return self.memory_mib / 1024


class Shape(_Entry):
    """What a model's memory follows from.

    Parameters
    ----------
    layers, kv_heads, head_dim
        Of its attention; heads that keep no keys and values have 0 layers.
    """

    parameters: int = Field(gt=0)
    layers: int = Field(ge=0)
    kv_heads: int = Field(ge=0)
    head_dim: int = Field(ge=0)


class Target(Shape):
    """A target model; `names` are those it is published under, the first one the usual."""

    names: tuple[str, ...] = Field(min_length=1)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    attention_heads: int = Field(gt=0)
    vocabulary: int = Field(gt=0)


class Draft(Shape):
    """A draft model or head, for the targets `of`."""

    names: tuple[str, ...] = Field(min_length=1)
    method: Method
    of: tuple[str, ...] = Field(min_length=1)


class Catalogue(BaseModel):
    """All that is known by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: Mapping[str, Gpu]
    targets: Mapping[str, Target]
    drafts: Mapping[str, Draft]

    @model_validator(mode="after")
    def _drafts_have_targets(self) -> Catalogue:
        for name, draft in self.drafts.items():
            for target in draft.of:
                if target not in self.targets:
                    raise ValueError(f"{name} is a draft of {target}, which is not here")
        return self


@cache
def catalogue() -> Catalogue:
    """Load the catalogue that comes with the package."""
    file = resources.files("backends.memory").joinpath("catalogue.yaml")
    return Catalogue.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))


def gpu(name: str) -> Gpu:
    """Return a GPU by its name.

    Raises
    ------
    ValueError
        If it is not known; the message names those that are.
    """
    known = catalogue().gpus
    if name.lower() not in known:
        raise ValueError(f"no such GPU: {name!r}; {did_you_mean(name.lower(), known)}")
    return known[name.lower()]


def target(name: str) -> Target | None:
    """Return a target by its short name or by one it is published under, whatever its case; None if it is not known."""
    wanted = name.lower()
    for short, entry in catalogue().targets.items():
        if wanted == short or wanted in {one.lower() for one in entry.names}:
            return entry
    return None


def draft(of: Target, method: Method, num_speculative_tokens: int = 1) -> Draft | None:
    """Return what `method` would use for a target: a published draft, else one as the method's layers have it.

    None for methods that have no draft, and for those whose size does not follow from the target's: a draft model, an
    MLP speculator, DFlash, DSpark, a class of one's own.
    """
    if method in WITHOUT_DRAFT:
        return None
    short = next((name for name, entry in catalogue().targets.items() if entry == of), "target")
    for entry in catalogue().drafts.values():
        if entry.method is method and short in entry.of:
            return entry
    return _from_layers(of, short, method, num_speculative_tokens)


def _from_layers(of: Target, short: str, method: Method, num_speculative_tokens: int) -> Draft | None:
    """Count the parameters of a head made for a target.

    EAGLE (arXiv 2401.15077): one decoder layer, and a projection from two hidden sizes to one; MTP (DeepSeek-V3, arXiv
    2412.19437) the same; both use the target's embedding and output layer. EAGLE-3 (arXiv 2503.01840): its projection
    is from three, its attention reads two, and it has an output layer of its own. Medusa (arXiv 2401.10774): for each
    position a residual block and an output layer.
    """
    hidden, kv = of.hidden_size, of.kv_heads * of.head_dim
    query = of.attention_heads * of.head_dim
    attention, mlp = 2 * hidden * query + 2 * hidden * kv, 3 * hidden * of.intermediate_size
    layers = 1
    if method in (Method.EAGLE, Method.MTP):
        parameters = 2 * hidden**2 + attention + mlp
    elif method is Method.EAGLE3:
        reads_two = hidden * query + 2 * hidden * kv
        parameters = 3 * hidden**2 + attention + reads_two + mlp + _EAGLE3_VOCABULARY * hidden
    elif method is Method.MEDUSA:
        parameters = num_speculative_tokens * (hidden**2 + hidden + hidden * of.vocabulary)
        layers = 0
    else:
        return None
    return Draft(
        names=(f"{short}-{method}",),
        method=method,
        of=(short,),
        parameters=parameters,
        layers=layers,
        kv_heads=of.kv_heads if layers else 0,
        head_dim=of.head_dim if layers else 0,
        source="shape",
    )
