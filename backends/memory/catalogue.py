"""Catalogue of GPUs, target models and drafts, with the shapes that determine their memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.speculation import Method
from backends.validation import did_you_mean

WITHOUT_DRAFT = frozenset({Method.BASELINE, Method.NGRAM, Method.SUFFIX})
"""Methods that keep no weights on the GPU besides the target's."""

_EAGLE3_VOCABULARY = 32_000  # published EAGLE-3 heads have a smaller output layer of their own


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1)


class Gpu(_Entry):
    """A GPU.

    Examples
    --------
    >>> gpu("h100").title, round(gpu("h100").memory_gib, 1)
    ('H100 80GB HBM3', 79.6)
    """

    title: str  # name in texts
    memory_mib: int = Field(gt=0)  # total memory in MiB, as the driver reports it

    @property
    def memory_gib(self) -> float:
        """Total memory in GiB."""
        return self.memory_mib / 1024


class Shape(_Entry):
    """The dimensions that determine a model's memory."""

    parameters: int = Field(gt=0)  # number of parameters
    # layers, kv_heads, head_dim: number of attention layers, KV heads per layer, and their size. Draft heads without
    # attention have 0 layers.
    layers: int = Field(ge=0)
    kv_heads: int = Field(ge=0)
    head_dim: int = Field(ge=0)


class Target(Shape):
    """A target model; `names` are the names under which it is published, the usual one first."""

    names: tuple[str, ...] = Field(min_length=1)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    attention_heads: int = Field(gt=0)
    vocabulary: int = Field(gt=0)


class Draft(Shape):
    """A draft model or head; `targets` are the short names of the targets that it drafts for."""

    names: tuple[str, ...] = Field(min_length=1)
    method: Method
    targets: tuple[str, ...] = Field(min_length=1)


class Catalogue(BaseModel):
    """GPUs, targets and drafts by short name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: Mapping[str, Gpu]
    targets: Mapping[str, Target]
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
    file = resources.files("backends.memory").joinpath("catalogue.yaml")
    return Catalogue.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))


def gpu(name: str) -> Gpu:
    """Return a GPU by its name, in any case."""
    known = catalogue().gpus
    if name.lower() not in known:
        raise ValueError(f"no such GPU: {name!r}; {did_you_mean(name.lower(), known)}")
    return known[name.lower()]


def target(name: str) -> Target | None:
    """Return a target by its short or a published name, in any case; None if it is unknown.

    Examples
    --------
    >>> target("meta-llama/Llama-3.1-8B-Instruct") is target("llama-3.1-8b")
    True
    """
    lowered = name.lower()
    for short, entry in catalogue().targets.items():
        if lowered == short or lowered in {published.lower() for published in entry.names}:
            return entry
    return None


def draft(of: Target, method: Method, num_speculative_tokens: int = 1) -> Draft | None:
    """Return a target's draft for `method`: a published one, else one with the layers of the method's paper.

    None for methods without a draft, and for those whose draft's size does not follow from the target's: draft model,
    MLP speculator, DFlash, DSpark and custom class.

    Examples
    --------
    >>> draft(target("llama-3.1-8b"), Method.EAGLE3).names
    ('yuhuili/EAGLE3-LLaMA3.1-Instruct-8B',)
    """
    if method in WITHOUT_DRAFT:
        return None
    short = next((name for name, entry in catalogue().targets.items() if entry == of), "target")
    for entry in catalogue().drafts.values():
        if entry.method is method and short in entry.targets:
            return entry
    return _from_layers(of, short, method, num_speculative_tokens)


def _from_layers(of: Target, short: str, method: Method, num_speculative_tokens: int) -> Draft | None:
    """Return a draft head for a target, with the number of parameters that follows from the layers of `method`.

    Notes
    -----
    EAGLE (arXiv 2401.15077) has one decoder layer and a projection from two hidden sizes to one; MTP (DeepSeek-V3,
    arXiv 2412.19437) has the same. Both share the target's embedding and output layer. EAGLE-3 (arXiv 2503.01840)
    projects from three hidden sizes, its attention reads two, and it has its own output layer. Medusa (arXiv
    2401.10774) has a residual block and an output layer for each position.
    """
    hidden, kv = of.hidden_size, of.kv_heads * of.head_dim
    query = of.attention_heads * of.head_dim
    attention, mlp = 2 * hidden * query + 2 * hidden * kv, 3 * hidden * of.intermediate_size
    layers = 1
    if method in (Method.EAGLE, Method.MTP):
        parameters = 2 * hidden**2 + attention + mlp
    elif method is Method.EAGLE3:
        second_input = hidden * query + 2 * hidden * kv
        parameters = 3 * hidden**2 + attention + second_input + mlp + _EAGLE3_VOCABULARY * hidden
    elif method is Method.MEDUSA:
        parameters = num_speculative_tokens * (hidden**2 + hidden + hidden * of.vocabulary)
        layers = 0
    else:
        return None
    return Draft(
        names=(f"{short}-{method}",),
        method=method,
        targets=(short,),
        parameters=parameters,
        layers=layers,
        kv_heads=of.kv_heads if layers else 0,
        head_dim=of.head_dim if layers else 0,
        source="shape",
    )
