"""Calibrations: measured step times, drafting costs, acceptance and memory of one target model on one machine."""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from backends.calibration.files import context_shift
from backends.calibration.gpus import Precision
from backends.drafter_limit import DrafterLimit
from backends.speculation import Method
from backends.validation import CheckedModel

Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]
ELSEWHERE: Final = (
    "Another version of vLLM: 3.7% in the median, up to 427%; another GPU: 16.2%, up to 369%. `gateway calibrate` and "
    "records of your own replicas replace it."
)
"""TPOT of base engines, as `python -m benchmarks.calibration base TABLE` and `scaled` print it."""
OUTSIDE_S: Final = 0.0045
"""How much later than its steps say vLLM 0.19 sent the first token on H100 and H200, in the median of eleven loads.
Half of the loads predict the others within 5%. vLLM 0.32 on a CPU is 2.3 to 4.2 ms late, one request at a time.
"""


class Kind(StrEnum):
    """Kinds of text. Acceptance was measured on the first five; the others use the nearest measured kind."""

    CHAT = "chat"
    CODE = "code"
    MATH = "math"
    SUMMARIZATION = "summarization"
    REASONING = "reasoning"
    EXTRACTION = "extraction"
    RAG = "rag"
    TRANSLATION = "translation"


_NEAREST = {
    Kind.EXTRACTION: Kind.SUMMARIZATION,  # both copy words of the prompt
    Kind.RAG: Kind.SUMMARIZATION,
    Kind.TRANSLATION: Kind.CHAT,
    Kind.REASONING: Kind.MATH,
}


def nearest_kind(kind: str, available: Container[Kind]) -> Kind:
    """Return the kind of text in `available` nearest to `kind`; chat for an unknown one.

    Examples
    --------
    >>> nearest_kind("rag", {Kind.CHAT, Kind.SUMMARIZATION}).value
    'summarization'
    >>> nearest_kind("poetry", {Kind.CHAT}).value
    'chat'
    """
    nearest = Kind(kind) if kind in set(Kind) else Kind.CHAT
    while nearest not in available and nearest in _NEAREST:
        nearest = _NEAREST[nearest]
    return nearest if nearest in available else Kind.CHAT


class _Sourced(CheckedModel):
    """A group of numbers with their source."""

    source: str = Field(min_length=1)


class StepTime(_Sourced):
    """Time of one step, without drafting.

    base + below_knee * min(tokens, knee) + above_knee * max(0, tokens - knee) + per_request * requests that get tokens
    + per_context_token * context + overhead. A step that drafts takes `speculation_overhead_s` more, and one with more
    than `graph_tokens`, the size of the largest captured graph, `no_graph_s` (0 tokens: no limit is known).

    A mixture of experts reads the experts that its tokens choose, `expert_share` of them per token:
    experts * (1 - (1 - expert_share) ** tokens). Each pair of a computed prompt token and a token before it adds
    `per_attended_s`.

    In a step that verifies drafts, FlashAttention 2 does not split a context among thread blocks. It then takes at
    least `per_unsplit_token_s` per token of the longest context and, as it computes 64 rows for few, 64
    `per_attended_s` per token of all contexts.
    """

    base_s: Seconds
    knee_tokens: int = Field(ge=0)
    per_token_below_knee_s: Seconds
    per_token_above_knee_s: Seconds
    per_context_token_s: Seconds
    overhead_s: Seconds
    speculation_overhead_s: Seconds = 0.0
    per_request_s: Seconds = 0.0
    graph_tokens: int = Field(default=0, ge=0)
    no_graph_s: Seconds = 0.0
    per_attended_s: Seconds = 0.0
    per_unsplit_token_s: Seconds = 0.0
    experts_s: Seconds = 0.0
    expert_share: Share = 0.0


class Drafting(_Sourced):
    """Time that drafting adds to a step.

    base + verify_share * verify + passes * (per_pass + per_request * drafting requests + per_context_token * their
    context). There are k passes, or 1 if all positions are drafted in parallel. The first pass reads what the previous
    step accepted, and takes as long as `first_passes` later ones. A step of adaptive verification takes `adaptive_s`
    more.
    """

    unmeasured_ms: tuple[float, float] | None = None
    """Range measured elsewhere, in milliseconds per step, if not measured with this target and machine."""

    base_s: Seconds = 0.0
    per_pass_s: Seconds = 0.0
    first_passes: float = Field(default=1.0, ge=1)
    per_request_s: Seconds = 0.0
    per_context_token_s: Seconds = 0.0
    verify_share: Share = 0.0
    adaptive_s: Seconds = 0.0
    parallel: bool = False

    def passes(self, k: int) -> float:
        """Return the time of drafting k tokens, in units of one later pass."""
        return (1 if self.parallel else k) - 1 + self.first_passes if k else 0.0


class _Curve(_Sourced):
    """Values at ascending points."""

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        points, values = [name for name in type(self).model_fields if name != "source"][:2]
        at = getattr(self, points)
        if len(at) != len(getattr(self, values)) or list(at) != sorted(set(at)):
            raise ValueError(f"{points} must ascend, with one of {values} for each")
        return self


class Progress(_Curve):
    """Shift of the acceptance logit as an answer grows: linear between the given tokens, constant beyond."""

    output_tokens: tuple[int, ...] = Field(min_length=1)
    logit_shifts: tuple[float, ...] = Field(min_length=1)


class ContextShift(_Curve):
    """Shift of the acceptance logits as the context grows: linear in log2 between given points, constant beyond."""

    tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)  # of context before a step, ascending
    # By context and draft position, shape (contexts, positions); the last also holds for further positions.
    logit_shifts: tuple[Annotated[tuple[float, ...], Field(min_length=1)], ...] = Field(min_length=1)
    known_to_tokens: int = Field(ge=1)  # the longest context measured


class Acceptance(_Sourced):
    """Acceptance of a model's drafts at temperature 0."""

    # Probability that the draft at position 1, 2, ... is accepted if those before it were. See `rates_to` for further
    # positions.
    by_position: tuple[Rate, ...] = Field(min_length=1)
    request_spread: float = Field(ge=0)  # standard deviation between requests of the logits of these probabilities
    progress: Progress | None = None  # change of the logits over an answer; None if not measured
    # What adaptive verification knows about a draft token before verifying it. A token's hardness is uniform in [0, 1);
    # the token is accepted if its hardness is below its rate. The engine knows the hardness to within a randomly placed
    # window of this width. None: it knows only the rates.
    confidence_window: float | None = Field(default=None, gt=0)


class MethodCalibration(CheckedModel):
    """The costs and acceptance of one method."""

    drafting: Drafting  # time of drafting
    taken_from: str = ""  # another calibration, if not measured with this target and machine
    # Acceptance by kind of text; empty for methods replayed on the text.
    acceptance: dict[Kind, Acceptance] = Field(default_factory=dict)
    acceptance_like: Method | None = None  # the method whose acceptance stands in, if none was published for this one
    # How acceptance changes with the context, or a name in context_shifts.yaml; None if no change was seen.
    context: ContextShift | None = None
    drafter_limit: DrafterLimit | None = None  # the longest context of the measured head
    # weights_gib, kv_kib_per_token: weights of the draft, and its KV cache per token.
    weights_gib: float = Field(default=0.0, ge=0)
    kv_kib_per_token: float = Field(default=0.0, ge=0)

    @field_validator("context", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return context_shift(value) if isinstance(value, str) else value


class Temperature(_Curve):
    """Factors of acceptance by temperature: linear between the given temperatures, constant beyond.

    Examples
    --------
    >>> Temperature(temperatures=(0.0, 1.0), factors=(1.0, 0.5), source="an example").factor(0.5)
    0.75
    """

    temperatures: tuple[float, ...] = Field(min_length=1)
    factors: tuple[Share, ...] = Field(min_length=1)
    default: float = Field(default=1.0, ge=0)
    """For requests that set none: from the target's generation_config.json, or vLLM's default of 1.0."""

    def factor(self, temperature: float) -> float:
        """Return the factor on the acceptance at temperature 0."""
        if temperature <= self.temperatures[0]:
            return self.factors[0]
        for (low, high), (at_low, at_high) in zip(pairwise(self.temperatures), pairwise(self.factors), strict=True):
            if temperature <= high:
                return at_low + (at_high - at_low) * (temperature - low) / (high - low)
        return self.factors[-1]


class Memory(_Sourced):
    """Memory over all GPUs; the KV cache gets utilization * gpu - reserved - weights."""

    gpu_gib: float = Field(gt=0)
    utilization: Share
    reserved_gib: float = Field(ge=0)
    weights_gib: float = Field(gt=0)
    kv_kib_per_token: float = Field(gt=0)


class Scheduler(_Sourced):
    """Limits of the scheduler: vLLM's defaults for the machine."""

    max_num_seqs: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    max_model_len: int = Field(ge=2)
    asynchronous: bool = True  # whether a step is scheduled while the previous one runs, with methods that allow it


class Measured(CheckedModel):
    """The engine on which step times were measured, and their error on held-out figures."""

    engine: str = Field(min_length=1)
    figures: int = Field(default=0, ge=0)  # held out; 0: error unknown
    error: float = Field(default=0.0, ge=0)  # relative, median
    most: float = Field(default=0.0, ge=0)  # relative, largest
    scaled_from: str = ""  # the other machine or model
    is_own: bool = False  # whether it was measured on the machine it is used for

    def __str__(self) -> str:
        """Return the engine and the error in words."""
        error = f"off by {self.error:.1%} in the median, {self.most:.0%} at most, on {self.figures} figures held out"
        error = error if self.figures else "its error on other figures is not known"
        if self.is_own:
            return f"measured with {self.engine}; {error}."
        scaled = f", scaled from {self.scaled_from}" if self.scaled_from else ""
        return f"measured with {self.engine}{scaled}; {error}. {ELSEWHERE}"


class Calibration(CheckedModel):
    """The calibration of one target model on one machine.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> calibration = load_calibration("llama-3.1-8b-h100")
    >>> calibration.acceptance(Method.EAGLE3, "code").by_position[:2]
    (0.771, 0.74)
    >>> calibration.kv_tokens(Method.BASELINE)
    439746
    """

    name: str  # in the package; for a file, its path
    target: str
    hardware: str
    precision: Precision = Precision.BF16  # of the target's weights
    measured: Measured | None = None  # None: a file without it, or fitted to records, whose replay says it
    step: StepTime
    outside_s: Seconds = OUTSIDE_S  # of a request outside the engine's steps: HTTP, tokenization, other processes
    memory: Memory
    scheduler: Scheduler
    temperature: Temperature
    methods: dict[Method, MethodCalibration]
    methods_from: str | None = None  # another calibration, which supplies the methods that this one lacks

    @model_validator(mode="after")
    def _acceptance_is_known(self) -> Self:
        for name, entry in self.methods.items():
            like = self.methods.get(entry.acceptance_like) if entry.acceptance_like else None
            if entry.acceptance_like and not (like and like.acceptance):
                raise ValueError(f"methods.{name}.acceptance_like: {entry.acceptance_like} has no acceptance here")
            if entry.acceptance and Kind.CHAT not in entry.acceptance:
                raise ValueError(f"methods.{name}.acceptance: chat is missing, which stands for unknown kinds of text")
        return self

    def method(self, method: Method) -> MethodCalibration:
        """Return the costs and acceptance of a method."""
        if method not in self.methods:
            known = ", ".join(sorted(self.methods))
            raise ValueError(f"calibration {self.name!r} has no method {method!s}; it has {known}")
        return self.methods[method]

    def taken_by_others(self) -> dict[Method, MethodCalibration]:
        """Return the methods, for use by a calibration that has not measured its own."""
        return {
            method: entry.model_copy(update={"taken_from": entry.taken_from or self.name})
            for method, entry in self.methods.items()
        }

    def premises(self, methods: Iterable[Method]) -> list[str]:
        """Return what it was measured on, its error, and the assumptions about unmeasured methods."""
        # A file may be a fit that is gone when this is read.
        where = "here" if Path(self.name).is_absolute() else f"for {self.name}"
        what = f"{self.name} is {self.target} in {self.precision} on {self.hardware}, {self.measured}"
        entries = {method: self.method(method) for method in dict.fromkeys(methods)}
        taken: dict[str, list[str]] = {}
        for method, entry in entries.items():
            if entry.taken_from and method is not Method.BASELINE:
                taken.setdefault(entry.taken_from, []).append(method)
        said = [what] * (self.measured is not None) + [
            f"Drafting times and acceptance of {', '.join(of)} were not measured {where}: they are {other}'s."
            for other, of in taken.items()
        ]
        for method, entry in entries.items():
            if between := entry.drafting.unmeasured_ms:
                own = f"{1e3 * entry.drafting.base_s:g} ms" if entry.drafting.base_s else "next to nothing"
                said.append(
                    f"What a step takes longer with {method} was not measured {where}: elsewhere it was "
                    f"{between[0]:g} to {between[1]:g} ms, and {own} is taken. `gateway calibrate` measures yours."
                )
        return said

    def acceptance(self, method: Method, kind: str) -> Acceptance:
        """Return the acceptance of a method's drafts in text of a kind; an unknown kind counts as chat."""
        entry = self.method(method)
        by_kind = entry.acceptance or (self.methods[entry.acceptance_like].acceptance if entry.acceptance_like else {})
        if not by_kind:
            raise ValueError(f"calibration {self.name!r} has no acceptance for {method!s}")
        return by_kind[nearest_kind(kind, by_kind)]

    def kv_room(self, method: Method) -> tuple[float, int]:
        """Return GiB and tokens of the KV cache next to target and draft weights; negative if these do not fit."""
        memory, draft = self.memory, self.method(method)
        room_gib = memory.gpu_gib * memory.utilization - memory.reserved_gib - (memory.weights_gib + draft.weights_gib)
        return room_gib, int(room_gib * 2**20 / (memory.kv_kib_per_token + draft.kv_kib_per_token))

    def kv_tokens(self, method: Method) -> int:
        """Return the number of tokens that fit into the KV cache next to target and draft weights."""
        _, tokens = self.kv_room(method)
        if tokens <= 0:
            raise ValueError(f"calibration {self.name!r}: no memory is left for the KV cache with {method!s}")
        return tokens
