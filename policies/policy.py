"""What a policy is: `choose` a backend for a request, `observe` what came of it; and a registry by name."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from backends.backend import Candidate
from backends.speculation import Method
from policies.experience import Experience
from policies.lookups import LookupSettings
from policies.request import TEXT_FEATURES, RequestFeatures


@dataclass(frozen=True, slots=True)
class Considered:
    """One of the candidates that a decision chose among.

    Parameters
    ----------
    predicted_s
        What the policy expects the request to take there, in seconds; None where it expects nothing.
    propensity
        Probability with which it was to be chosen, in [0, 1].
    in_flight
        Requests of this gateway there, without the one to be placed.
    """

    backend: str
    predicted_s: float | None
    propensity: float
    in_flight: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why.

    Parameters
    ----------
    backend
        Name of the chosen candidate.
    reason
        One of a small fixed set of words for each policy (it becomes a Prometheus label): the rule's name,
        `fewest_in_flight`, `next_in_turn` and the like. Never a number or anything from the request.
    propensity
        Probability with which the policy would choose this backend in this situation, in (0, 1].
    considered
        All candidates, for the record; empty where the policy tells only of the chosen one.
    memo
        For the policy itself: it finds it again in the outcome.
    """

    backend: str
    policy: str
    reason: str
    propensity: float = 1.0
    considered: tuple[Considered, ...] = ()
    memo: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Assessment:
    """What a policy thinks of one candidate, for `POST /admin/explain`.

    Parameters
    ----------
    score
        What the policy minimises, in its own unit; None where it does not score this candidate.
    note
        For a person: the rule that names it, the term that decides.
    """

    backend: str
    score: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request that was relayed.

    Parameters
    ----------
    status
        HTTP status the client was given; 499 if the client left first.
    ttft_s, e2e_s
        Seconds from the request's arrival to its first content chunk, and to its end; ttft None if none came.
    tpot_s
        Seconds per output token after the first; None where fewer than two tokens came.
    prompt_tokens, output_tokens
        From the engine's usage where it sent it, else estimated.
    tokens_per_step
        Output tokens per engine step (accepted + 1); None if not known.
    cached_tokens
        Prompt tokens that the engine found in its prefix cache; None if it did not say.
    lookups
        Tokens per step that lookups would have given on the finished text, whoever wrote it, by arm (see
        `policies.acceptance.arm_of`).
    """

    request: RequestFeatures
    decision: Decision
    method: Method
    status: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_step: float | None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    cached_tokens: int | None = None
    lookups: Mapping[str, float] = field(default_factory=dict)


SettingsPath = tuple[str | int, ...]
"""Where in a policy's settings a value stands, as pydantic's `loc`: `("rules", 0, "prefer", 1)`."""


class PolicySettings(BaseModel):
    """Base of every policy's settings: what may stand beside `name:` under `policy:` in the pool file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def named_backends(self) -> dict[SettingsPath, str]:
        """Return the backends that the settings name, and where: whoever knows the pool checks that they exist."""
        return {}


class Policy(ABC):
    """Chooses a backend for each request of one model.

    A policy is one small file: subclass, set `name`, write `choose`, decorate with `register`. It is built once
    a model with its settings, is called from one thread, and must not block.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[PolicySettings]] = PolicySettings
    text_features: frozenset[str] = TEXT_FEATURES
    """Those of `policies.request.TEXT_FEATURES` that it decides by; what it does not name is not worked out for it."""
    tells_considered: bool = False
    """Whether decisions are to tell of all candidates; set by whoever records them."""
    experience: Experience | None = None
    """What it has observed, to be kept and shared; None for a policy that learns nothing."""

    lookups: LookupSettings | None = None
    """What it wants to know of what lookups would have given on finished texts; None for nothing."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    @abstractmethod
    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose one of `candidates` (never empty, all able to serve the request) for `request`."""

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Say what `choose` would think of each candidate, changing nothing."""
        return [Assessment(candidate.name, None, "not scored by this policy") for candidate in candidates]

    def rehearsal(self) -> Self:
        """Return a copy that would choose as this policy does, and whose choices change nothing here.

        To be overridden by whatever is large: it is called on the event loop.
        """
        return copy.deepcopy(self)

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 -- most policies learn nothing
        """Learn from a finished request."""

    def observe_lookups(self, outcome: Outcome) -> None:  # noqa: B027 -- most policies learn nothing
        """Learn from `outcome.lookups` alone, found out later, of a request that was observed when it finished."""

    def set_clock(self, clock: Callable[[], float]) -> None:  # noqa: B027 -- most policies know no time
        """Take the time in seconds from `clock`, as a replay wants it; by default it is that of `time.time`."""

    def upkeep(self) -> Callable[[], None] | None:
        """Return work to be done beside the request path, or None if there is none.

        Called about every half second, from the thread that calls `choose`; the work itself may run in another, so it
        must not touch what `choose` and `observe` change, and must put its results in place in one assignment.
        """
        return None


_REGISTRY: dict[str, type[Policy]] = {}
P = TypeVar("P", bound=type[Policy])


def register(policy: P) -> P:
    """Make a policy known by its name (a class decorator).

    Raises
    ------
    ValueError
        If another policy has that name.
    """
    if _REGISTRY.setdefault(policy.name, policy) is not policy:
        raise ValueError(f"two policies are called {policy.name!r}")
    return policy


def policies() -> dict[str, type[Policy]]:
    """Return every registered policy by name, importing each module of this package so that it can register."""
    import policies

    for module in iter_modules(policies.__path__):
        import_module(f"policies.{module.name}")
    return dict(sorted(_REGISTRY.items()))
