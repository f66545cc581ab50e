"""What a policy is: `choose` a backend for a request, `observe` what came of it; and a registry by name."""

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
"""Where in a policy's settings a value stands, as pydantic's `loc`: `("rules", 0, "prefer", 1)`."""


class Work(Protocol):
    """Work to be done beside the request path."""

    def __call__(self, pause: Callable[[], object] = lambda: None, /) -> None:
        """Do it, and call `pause` from time to time, where it can as well go on later."""


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
    """Those of `request.TEXT_FEATURES` that it decides by; what it does not name is not worked out for it."""
    reads_requests: bool = True
    """Whether it looks at requests: if not, it sees `request.ANY_REQUEST`, and none is described for it."""
    explain_candidates: bool = False
    """Whether decisions are to tell of all candidates; set by whoever records them."""
    statistics: Statistics | None = None
    """What it has observed, to be kept and shared; None for a policy that learns nothing."""

    shadow: ShadowSettings | None = None
    """What it wants to know of what lookups would have given on finished texts; None for nothing."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    @abstractmethod
    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose one of `candidates` (never empty, all able to serve the request) for `request`."""

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Say what `choose` would think of each candidate, changing nothing."""
        return [Assessment(candidate.name, None, "not scored by this policy") for candidate in candidates]

    def dry_run_copy(self) -> Self:
        """Return a copy that would choose as this policy does, and whose choices change nothing here.

        To be overridden by whatever is large: it is called on the event loop.
        """
        return copy.deepcopy(self)

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 -- most policies learn nothing
        """Learn from a finished request."""

    def observe_shadow(self, outcome: Outcome) -> None:  # noqa: B027 -- most policies learn nothing
        """Learn from `outcome.shadow` alone, found out later, of a request that was observed when it finished."""

    def set_clock(self, clock: Callable[[], float]) -> None:  # noqa: B027 -- most policies know no time
        """Take the time in seconds from `clock`, as a replay wants it; by default it is that of `time.time`."""

    def warm_up(self) -> None:  # noqa: B027 -- most policies learn nothing
        """Load what learning takes, in any thread, before the first request comes or beside it."""

    def maintenance(self) -> Work | None:
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
    """Return every policy by name: those of this package, and those of installed packages.

    A package registers its policies through the entry point group `speculation_gateway.policies`: each entry names a
    `Policy` subclass, or a module that registers some.

    Raises
    ------
    ImportError
        If an entry point cannot be loaded.
    """
    for module in _OWN:
        import_module(module)
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
    return dict(sorted(_REGISTRY.items()))


ENTRY_POINTS = "speculation_gateway.policies"
_OWN = ("policies.load_balancing", "policies.rules.policy", "policies.learned.policy")
"""The modules with policies in them."""
