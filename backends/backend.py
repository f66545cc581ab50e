"""One engine replica: who it is, how it is, and what a policy may see of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from backends.speculation import Method


class State(StrEnum):
    """Whether a backend may be sent requests."""

    STARTING = "starting"  # not yet seen well
    UP = "up"
    DOWN = "down"  # refuses, hangs or fails its health check
    EJECTED = "ejected"  # passes its health check, but its answers are broken; tried again after a while
    DRAINING = "draining"  # an operator took it out; what runs there may finish


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine itself last said of its load (`/metrics`).

    Parameters
    ----------
    running, waiting
        Requests in the batch, and queued for it, from all clients of the engine.
    kv_usage
        Share of the KV cache in use, 0 to 1.
    others
        Of the requests running and waiting, those that this gateway process had not sent.
    at_s
        When it was read, on the clock of `time.monotonic`; 0.0 means never.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    others: int = 0
    at_s: float = 0.0


class Candidate(Protocol):
    """What a policy sees of a backend. `Backend` is one; replay and tests bring their own."""

    @property
    def name(self) -> str:
        """Unique within its model."""
        ...

    @property
    def method(self) -> Method:
        """How it speculates."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens drafted a step at most; 0 for a baseline."""
        ...

    @property
    def weight(self) -> float:
        """The operator's share for it, relative to the others; 1.0 by default."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests of this gateway that it is working on."""
        ...

    @property
    def load(self) -> EngineLoad:
        """What the engine last said of its load."""
        ...


@dataclass(slots=True)
class Backend:
    """A replica as the gateway knows it: its identity, fixed, and its condition, which the pool keeps.

    Parameters
    ----------
    model
        The name clients ask for.
    url
        Base address, `http://host:port`, `https://...` or `unix:/path/to.sock`, without a trailing slash.
    api_key
        Sent to the engine as a bearer token; None sends none.
    simulated
        True for a replica of the built-in simulator: it is labelled as such wherever it shows.
    """

    name: str
    model: str
    method: Method
    url: str
    num_speculative_tokens: int = 0
    speculative_config: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    weight: float = 1.0
    simulated: bool = False

    state: State = State.STARTING
    state_reason: str = "not yet checked"
    in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)
