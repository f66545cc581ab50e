"""The policy interface, and the registry of policies by name."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import ClassVar, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from backends.backend import Candidate
from policies.decision import Assessment, CandidateScores, Decision, Outcome
from policies.features.request import TEXT_FEATURES, RequestFeatures
from policies.learned.shadow_drafting import ShadowSettings
from policies.statistics import Statistics

__all__ = [
    "Assessment",
    "CandidateScores",
    "Decision",
    "Outcome",
    "Policy",
    "PolicySettings",
    "SettingsPath",
    "Work",
    "policies",
    "register",
]

SettingsPath = tuple[str | int, ...]
"""Path of a value in a policy's settings, like pydantic's `loc`: `("rules", 0, "prefer", 1)`."""


class Work(Protocol):
    """Background work, done off the request path."""

    def __call__(self, pause: Callable[[], object] = lambda: None, /) -> None:
        """Do the work, calling `pause` at points where it may be interrupted."""


class PolicySettings(BaseModel):
    """Base class of policy settings: the keys beside `name:` under `policy:` in the pool file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def named_backends(self) -> dict[SettingsPath, str]:
        """Return the backend names in the settings, by path; the loader of the pool file checks that they exist."""
        return {}


class Policy(ABC):
    """A rule for choosing the backend of each request of one model.

    To write a policy, subclass this, set `name`, implement `choose` and decorate the class with `register`. One
    instance is created per model. It is called from one thread and must not block.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from backends.speculation import Method
    >>> from policies.features.request import ANY_REQUEST
    >>> class FirstName(Policy):
    ...     name = "first_name"
    ...
    ...     def choose(self, request, candidates):
    ...         return Decision(min(one.name for one in candidates), self.name, "first")
    >>> pool = [Backend(name, "llama", Method.NGRAM, "http://127.0.0.1:8001") for name in ("b", "a")]
    >>> FirstName(PolicySettings()).choose(ANY_REQUEST, pool).backend
    'a'
    """

    name: ClassVar[str]
    Settings: ClassVar[type[PolicySettings]] = PolicySettings
    text_features: frozenset[str] = TEXT_FEATURES
    """The subset of `request.TEXT_FEATURES` that the policy uses; the others are not computed."""
    reads_requests: bool = True
    """Whether the policy reads requests; if not, it is passed `request.ANY_REQUEST`."""
    explain_candidates: bool = False
    """Whether decisions must include the scores of all candidates; set when requests are recorded."""
    statistics: Statistics | None = None
    """The policy's observations, to be stored and shared; None if it does not learn."""
    shadow: ShadowSettings | None = None
    """Settings of the shadow drafting that the policy needs; None if it needs none."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    @abstractmethod
    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose one of `candidates` for `request`; there is at least one, and each can serve the request."""

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Rate each candidate as `choose` would, without side effects."""
        return [Assessment(candidate.name, None, "not scored by this policy") for candidate in candidates]

    def dry_run_copy(self) -> Self:
        """Return a copy that chooses as this policy does, and whose choices do not affect this policy.

        Override it in a policy with large state: it is called on the event loop.
        """
        return copy.deepcopy(self)

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 -- most policies do not learn
        """Learn from a finished request."""

    def observe_shadow(self, outcome: Outcome) -> None:  # noqa: B027 -- most policies do not learn
        """Learn from `outcome.shadow`, which is computed some time after `observe` was called for the same request."""

    def set_clock(self, clock: Callable[[], float]) -> None:  # noqa: B027 -- most policies use no clock
        """Replace the clock, which returns seconds; the default is `time.time`."""

    def warm_up(self) -> None:  # noqa: B027 -- most policies do not learn
        """Import the libraries that learning needs; may be called in any thread, while requests are served."""

    def maintenance(self) -> Work | None:
        """Return background work that is due, or None.

        Called about every half second from the thread that calls `choose`. The work may run in another thread, so it
        must not touch what `choose` and `observe` change, and must publish its results in a single assignment.
        """
        return None


_REGISTRY: dict[str, type[Policy]] = {}
P = TypeVar("P", bound=type[Policy])


def register(policy: P) -> P:
    """Register a policy under its name (a class decorator).

    Raises
    ------
    ValueError
        If another policy has that name.
    """
    if _REGISTRY.setdefault(policy.name, policy) is not policy:
        raise ValueError(f"two policies are called {policy.name!r}")
    return policy


def policies() -> dict[str, type[Policy]]:
    """Return every policy by name, including those of installed packages.

    A package provides policies through the entry point group `speculation_gateway.policies`. Each entry point names a
    `Policy` subclass, or a module that registers some.

    Raises
    ------
    ImportError
        If an entry point cannot be loaded.

    Examples
    --------
    >>> policies()["least_loaded"].__name__
    'LeastLoaded'
    """
    for module in _OWN:
        import_module(module)
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
    return dict(sorted(_REGISTRY.items()))


ENTRY_POINTS = "speculation_gateway.policies"
_OWN = ("policies.load_balancing", "policies.rules.policy", "policies.learned.policy")
"""Modules of this package that register policies."""
