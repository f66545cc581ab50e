"""One engine replica: its identity, its state, and the part of it that policies see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from mypy_extensions import mypyc_attr

from backends.draft_schedule import DraftSchedule, Speculation, draft_schedule, effective_k
from backends.drafter_limit import DrafterLimit, beyond_of
from backends.engine import Engine, Said
from backends.health import Health
from backends.speculation import Method
from backends.step_comparison import Difference


class EngineChange(StrEnum):
    """What an engine went through that may have broken its drafter; each value names the cause of a silent drafter."""

    RESTART = "since_restart"
    WAKE_UP = "since_wake_up"  # from vLLM's sleep mode, whose level 2 discards the weights
    RELOAD = "since_reload"  # of weights, or of the pool file with another replica under the same name
    SPECULATION = "since_other_speculation"  # as its counters show; no cause: it has a different drafter


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load that an engine last reported in `/metrics`.

    Parameters
    ----------
    running, waiting
        Requests in the batch and in the queue, from all clients of the engine.
    kv_usage
        Share of the KV cache in use, 0 to 1.
    others
        Requests that this gateway process did not send: those of its peers, about 0.1 s old, and any more that the
        engine reported.
    at_s
        Time of the reading on the clock of `time.monotonic`; 0.0 means never, infinity that it does not expire.
    kv_tokens
        Tokens that the KV cache holds; 0 if unknown.
    tokens_per_step
        Mean per sequence since the engine started; 0.0 if unknown.
    drafts, accepted_tokens
        Steps with a draft, and tokens accepted, since the engine started; 0 if unknown.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    others: int = 0
    at_s: float = 0.0
    kv_tokens: int = 0
    tokens_per_step: float = 0.0
    drafts: int = 0
    accepted_tokens: int = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class Candidate:
    """A backend as a policy sees it."""

    name: str  # unique within its model
    method: Method  # as in the pool file, unless the engine contradicts it
    num_speculative_tokens: int  # maximum tokens drafted per step; 0 for a baseline
    draft_schedule: DraftSchedule  # tokens drafted per step by batch size
    drafter_limit: DrafterLimit | None  # the longest context that the drafter serves; None if unknown
    weight: float  # the operator's intended share of the traffic, relative to the other backends
    in_flight: int  # requests that this gateway process has in flight to it
    load: EngineLoad  # the load that the engine last reported


@dataclass(slots=True, eq=False)  # a replica equals itself alone: a search in a list compares no fields
class Backend(Candidate):
    """A replica: its fixed configuration, and its state, which the pool updates.

    Its method and k are state: they start as configured and follow what the engine's counters show.

    Parameters
    ----------
    model
        The model name that clients request.
    url
        Base address, `http://host:port`, `https://...` or `unix:/path/to.sock`, without a trailing slash.
    api_key
        Bearer token for the engine; None sends none.
    simulated
        True for a replica of the built-in simulator; all output labels it as such.
    launched
        True if the gateway starts its process, so that it refuses connections at first.
    draft_depth
        Whether its engine drafts to the depth that each request asks for, with `deploy/vllm_draft_depth`.
    flags
        Flags of the `vllm serve` that the gateway starts; None for another engine.
    asks_version
        Whether the engine's version of vLLM decides what happens beyond its drafter's limit.
    context_range
        The fewest and most prompt tokens of the requests it is meant for; None for all.
    engine
        What is known about the engine that answers there now; the fields below derive from it.
    health
        What is known about its health.
    sent
        Requests that this process has sent to it.
    read_s
        When any part of an answer was last read from it, by `time.perf_counter`.
    answered_tokens, answered_steps
        Tokens so far of answers with known steps, and those steps.

    Attributes
    ----------
    declared
        How it speculates according to the pool file.
    declared_limit
        Its drafter's limit according to the pool file; None if its engine serves no longer contexts.
    draft_schedule
        Tokens drafted per step by batch size.

    Examples
    --------
    >>> backend = Backend("a", "llama", Method.NGRAM, "http://127.0.0.1:8001", num_speculative_tokens=5)
    >>> backend.health.state.value, backend.health.reason, backend.in_flight
    ('starting', 'not yet checked', 0)
    """

    name: str = field()  # when compiled, the base class's attribute would be its default
    model: str
    method: Method = field()
    url: str
    num_speculative_tokens: int = 0
    speculative_config: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    weight: float = 1.0
    simulated: bool = False
    launched: bool = False
    flags: tuple[str, ...] | None = None
    drafter_limit: DrafterLimit | None = None
    draft_depth: bool = False
    asks_version: bool = False
    context_range: tuple[int, int] | None = None

    health: Health = field(default_factory=Health)
    in_flight: int = 0
    engine: Engine = field(default_factory=Engine)
    sent: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)
    read_s: float = 0.0
    answered_tokens: float = 0.0
    answered_steps: float = 0.0
    declared: Speculation = field(init=False)
    declared_limit: DrafterLimit | None = field(init=False)
    draft_schedule: DraftSchedule = field(init=False)

    def __post_init__(self) -> None:
        k = effective_k(self.method, self.num_speculative_tokens)
        self.draft_schedule = draft_schedule(self.method, {"num_speculative_tokens": k, **self.speculative_config})
        self.declared = Speculation(self.method, self.draft_schedule)
        self.declared_limit = self.drafter_limit

    def set_engine(self, said: Said, *, is_new: bool = False) -> None:
        """Set what its engine reports about itself; for a new engine, first discard all about the previous one."""
        if is_new:
            self.engine, self.load = Engine(), EngineLoad()
            self.observe({}, self.declared)
        if not said.context_tokens:  # if unreported, what its rejections have shown
            said = replace(said, context_tokens=self.engine.said.context_tokens)
        self.engine.said = said
        limit = self.declared_limit
        if limit is not None and self.asks_version:
            limit = replace(limit, beyond=beyond_of(self.declared.method, said.version))
        self.drafter_limit = None if limit is not None and 0 < said.context_tokens <= limit.tokens else limit

    def observe(self, contradictions: Mapping[str, str], speculation: Speculation) -> None:
        """Set how the engine speculates, and its contradictions to the pool file."""
        self.engine.contradictions = contradictions
        self.method, self.draft_schedule = speculation
        self.num_speculative_tokens = self.draft_schedule.k

    def take(self) -> None:
        """Count a request sent to it."""
        self.in_flight += 1
        self.sent += 1

    def release(self) -> None:
        """Count a request as ended."""
        self.in_flight -= 1

    def note_read(self, now_s: float) -> None:
        """Record when any part of an answer was last read."""
        self.read_s = now_s

    def count_steps(self, tokens: float, steps: float) -> None:
        """Count the tokens of an answer and the steps they took."""
        self.answered_tokens += tokens
        self.answered_steps += steps

    @property
    def difference(self) -> Difference | None:
        """How tokens per step differ between what its answers show and what its engine counts; None if alike."""
        return self.engine.comparison.difference

    @property
    def contradiction(self) -> str | None:
        """How the engine contradicts the pool file, in words; None if they agree."""
        found = self.engine.contradictions
        return f"the pool file says {self.declared}, but {' and '.join(found.values())}" if found else None
