"""What real engines measured, as data: step times, drafting, acceptance and memory of one target on one machine."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.speculation import Method

Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]


class Kind(StrEnum):
    """Kinds of text. Acceptance was measured on the first five; the others borrow from their nearest."""

    CHAT = "chat"
    CODE = "code"
    MATH = "math"
    SUMMARIZATION = "summarization"
    REASONING = "reasoning"
    EXTRACTION = "extraction"
    RAG = "rag"
    TRANSLATION = "translation"


NEAREST = {
    Kind.EXTRACTION: Kind.SUMMARIZATION,  # the output is made of the prompt's words
    Kind.RAG: Kind.SUMMARIZATION,
    Kind.TRANSLATION: Kind.CHAT,
    Kind.REASONING: Kind.MATH,
}


class _Sourced(BaseModel):
    """A group of numbers and where they come from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1)


class StepTime(_Sourced):
    """Time of one iteration without drafting.

    base + below_knee * min(tokens, knee) + above_knee * max(0, tokens - knee) + per_context_token * context + overhead;
    where a step drafts, `speculation_overhead_s` is added.
    """

    base_s: Seconds
    knee_tokens: int = Field(ge=0)
    per_token_below_knee_s: Seconds
    per_token_above_knee_s: Seconds
    per_context_token_s: Seconds
    overhead_s: Seconds
    speculation_overhead_s: Seconds = 0.0


class Drafting(_Sourced):
    """Time that drafting adds to a step.

    base + per_pass * passes + verify_share * verify + passes * (per_request * drafting requests
    + per_context_token * their context); passes is k, or 1 where all positions are drafted at once.
    """

    base_s: Seconds = 0.0
    per_pass_s: Seconds = 0.0
    per_request_s: Seconds = 0.0
    per_context_token_s: Seconds = 0.0
    verify_share: Share = 0.0
    parallel: bool = False


class Progress(_Sourced):
    """How acceptance changes as an answer grows: its logit shifted, linear between given output tokens, flat beyond."""

    output_tokens: tuple[int, ...] = Field(min_length=1)
    logit_shifts: tuple[float, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if len(self.output_tokens) != len(self.logit_shifts):
            raise ValueError("one shift for each number of output tokens")
        if any(later <= earlier for earlier, later in pairwise(self.output_tokens)):
            raise ValueError("output_tokens must rise")
        return self


class Acceptance(_Sourced):
    """Acceptance of a model's drafts at temperature 0.

    Parameters
    ----------
    by_position
        Probability that the draft at position 1, 2, ... is accepted if those before it were; the last holds beyond.
    request_spread
        Standard deviation between requests of the logit of those probabilities.
    progress
        How they change over an answer; absent where that was not seen.
    """

    by_position: tuple[Rate, ...] = Field(min_length=1)
    request_spread: float = Field(ge=0)
    progress: Progress | None = None


class MethodCalibration(BaseModel):
    """One method's costs.

    Parameters
    ----------
    acceptance
        By kind of text; absent for methods that are replayed on the text.
    acceptance_like
        Another method whose acceptance stands in; only where none was published for this one.
    weights_gib, kv_kib_per_token
        What the draft adds to the target's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    drafting: Drafting
    acceptance: dict[Kind, Acceptance] = Field(default_factory=dict)
    acceptance_like: Method | None = None
    weights_gib: float = Field(default=0.0, ge=0)
    kv_kib_per_token: float = Field(default=0.0, ge=0)


class Temperature(_Sourced):
    """How acceptance falls with temperature: factors at given temperatures, linear between, flat beyond."""

    temperatures: tuple[float, ...] = Field(min_length=1)
    factors: tuple[Share, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if len(self.temperatures) != len(self.factors):
            raise ValueError("one factor for each temperature")
        if any(later <= earlier for earlier, later in pairwise(self.temperatures)):
            raise ValueError("temperatures must rise")
        return self

    def factor(self, temperature: float) -> float:
        """Return what acceptance at temperature 0 is multiplied by."""
        if temperature <= self.temperatures[0]:
            return self.factors[0]
        for (low, high), (at_low, at_high) in zip(pairwise(self.temperatures), pairwise(self.factors), strict=True):
            if temperature <= high:
                return at_low + (at_high - at_low) * (temperature - low) / (high - low)
        return self.factors[-1]


class Memory(_Sourced):
    """What the KV cache gets: utilisation * gpu - reserved - weights, over all GPUs."""

    gpu_gib: float = Field(gt=0)
    utilization: Share
    reserved_gib: float = Field(ge=0)
    weights_gib: float = Field(gt=0)
    kv_kib_per_token: float = Field(gt=0)


class Scheduler(_Sourced):
    """The scheduler's limits, vLLM's defaults for the machine."""

    max_num_seqs: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    max_model_len: int = Field(ge=2)


class Calibration(BaseModel):
    """One target model on one machine.

    Parameters
    ----------
    methods_from
        Another calibration: methods that this one does not list are taken from it as they are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    target: str
    hardware: str
    step: StepTime
    memory: Memory
    scheduler: Scheduler
    temperature: Temperature
    methods: dict[Method, MethodCalibration]
    methods_from: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for method, entry in self.methods.items():
            like = entry.acceptance_like
            if like is not None and not (like in self.methods and self.methods[like].acceptance):
                raise ValueError(f"{method}: acceptance_like {like} has no acceptance of its own")
            if entry.acceptance and Kind.CHAT not in entry.acceptance:
                raise ValueError(f"{method}: acceptance for chat is needed, the one that others fall back on")
        return self

    def method(self, method: Method) -> MethodCalibration:
        """Return the costs of a method.

        Raises
        ------
        ValueError
            If this calibration has none for it; the message names those it has.
        """
        if method not in self.methods:
            known = ", ".join(sorted(self.methods))
            raise ValueError(f"calibration {self.name!r} knows nothing of {method!s}; it knows {known}")
        return self.methods[method]

    def acceptance(self, method: Method, kind: str) -> Acceptance:
        """Return the acceptance of a method's drafts in text of a kind; that of chat where the kind is not known.

        Raises
        ------
        ValueError
            If this calibration has no acceptance for the method.
        """
        entry = self.method(method)
        by_kind = entry.acceptance or (self.methods[entry.acceptance_like].acceptance if entry.acceptance_like else {})
        if not by_kind:
            raise ValueError(f"calibration {self.name!r} has no acceptance for {method!s}")
        wanted = Kind(kind) if kind in set(Kind) else Kind.CHAT
        while wanted not in by_kind and wanted in NEAREST:
            wanted = NEAREST[wanted]
        return by_kind.get(wanted, by_kind[Kind.CHAT])

    def kv_tokens(self, method: Method) -> int:
        """Return how many tokens the KV cache holds beside the weights of target and draft.

        Raises
        ------
        ValueError
            If the weights leave no room.
        """
        entry = self.method(method)
        room_gib = (
            self.memory.gpu_gib * self.memory.utilization
            - self.memory.reserved_gib
            - self.memory.weights_gib
            - entry.weights_gib
        )
        tokens = int(room_gib * 2**20 / (self.memory.kv_kib_per_token + entry.kv_kib_per_token))
        if tokens <= 0:
            raise ValueError(f"calibration {self.name!r}: no memory is left for the KV cache with {method!s}")
        return tokens


def calibration_names() -> tuple[str, ...]:
    """Return the names of the calibrations that come with the package."""
    folder = resources.files("backends.calibration").joinpath("data")
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


@cache
def load_calibration(name: str) -> Calibration:
    """Load a calibration that comes with the package.

    Raises
    ------
    ValueError
        If there is none of that name (the message lists those there are) or its file is wrong.
    """
    if name not in calibration_names():
        raise ValueError(f"no calibration is called {name!r}; known are {', '.join(calibration_names())}")
    return Calibration.model_validate(_document(name))


def _document(name: str) -> dict[str, Any]:
    """Return a calibration as it is written, completed with the methods it takes from another."""
    file = resources.files("backends.calibration").joinpath("data", f"{name}.yaml")
    document: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    if "methods_from" in document:
        document["methods"] = _document(document["methods_from"])["methods"] | document["methods"]
    return document
