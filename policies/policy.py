"""The policy interface, and the registry of policies by name."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from typing import ClassVar, TypeVar

from pydantic import Field

from backends.backend import Candidate
from backends.validation import CheckedModel
from policies.decision import Assessment, Decision, Outcome
from policies.features.request import TEXT_FEATURES, RequestFeatures

__all__ = [
    "Assessment",
    "Decision",
    "Outcome",
    "Policy",
    "PolicySettings",
    "SettingsPath",
    "policies",
    "register",
]

Choose = Callable[[RequestFeatures, Sequence[Candidate]], Decision]
"""Type of `Policy.choose`."""

SettingsPath = tuple[str | int, ...]
"""Path of a value in a policy's settings, like pydantic's `loc`: `("rules", 0, "prefer", 1)`."""


class GuardrailSettings(CheckedModel):
    """Comparison with `least_loaded` by whole blocks of time, which freezes a worse policy."""

    share: float = Field(
        default=0.02,
        ge=0,
        le=0.5,
        description="Share of the time in which `least_loaded` decides; 0, as in other policies than `learned` "
        "without this section: no comparison. It costs that share of what the policy gains: 0.02 of a gain of 10% is "
        "0.2% of the mean time.",
    )
    block_s: float = Field(
        default=60,
        ge=1,
        description="Seconds under one of the two at a time, at least eight times the mean time of a request; the same "
        "in all gateways of a pool, whose clocks must agree to a second or so.",
    )
    confidence: float = Field(
        default=0.99, gt=0.5, lt=1, description="Confidence that the policy is worse at which it is frozen."
    )
    tolerance: float = Field(
        default=0.02, ge=0, description="Relative slowdown against `least_loaded` that is tolerated."
    )


class PolicySettings(CheckedModel):
    """Base class of policy settings: the keys next to `name:` under `policy:` in the pool file."""

    guardrail: GuardrailSettings = Field(default=GuardrailSettings(share=0), description=GuardrailSettings.__doc__)
    outlier_ejection: bool = Field(
        default=False, description="Whether backends that behave unlike their method are taken out for a while."
    )

    def named_backends(self) -> dict[SettingsPath, str]:
        """Return the backend names in the settings, by path; the loader of the pool file checks that they exist."""
        return {}


class Policy(ABC):
    """A rule for choosing the backend of each request of one model.

    To write a policy, subclass this, set `name`, implement `choose` and decorate the class with `register`. One
    instance is created per model. It is called from one thread and must not block. `policies.roles` has what
    else a policy may do.
    """

    name: str
    Settings: ClassVar[type[PolicySettings]] = PolicySettings
    text_features: frozenset[str] = TEXT_FEATURES
    """The subset of `request.TEXT_FEATURES` that the policy uses; the others are not computed."""
    reads_requests: bool = True
    """Whether the policy reads requests; if not, it gets `request.ANY_REQUEST`."""
    prices_limits: bool = False
    """Whether the policy prices a drafter's limit and troubles; if not, `drafter_limits.sparing` and `Troubles.sparing`
    narrow its candidates."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    @abstractmethod
    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose one of `candidates` for `request`; there is at least one, and each can serve the request."""


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

    A package provides policies through the entry point group `speculation_gateway.policies`. Each entry names a
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
    for entry in _installed(tuple(sys.path)):
        entry.load()
    return dict(sorted(_REGISTRY.items()))


@functools.cache
def _installed(_: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of the packages on a path; cached, since it reads the metadata of all packages."""
    return entry_points(group=ENTRY_POINTS)


ENTRY_POINTS = "speculation_gateway.policies"
_OWN = (
    "policies.balancing.least_loaded",
    "policies.balancing.lmetric",
    "policies.balancing.power_of_two",
    "policies.balancing.random",
    "policies.balancing.round_robin",
    "policies.balancing.static",
    "policies.rules.policy",
    "policies.learned.policy",
)
"""Modules of this package that register policies."""
