"""What a policy may do besides choosing: five roles, each a base class whose methods do nothing unless overridden.

The gateway looks up the roles when it assembles a model, and calls only those that a policy has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from backends.backend import Candidate, EngineChange
from policies.decision import Assessment, Decision, Outcome
from policies.features.request import RequestFeatures
from policies.policy import Policy
from policies.statistics import Statistics

if TYPE_CHECKING:
    from policies.guarded.guardrail import Guardrail
    from policies.learned.detector import Detector
    from policies.learned.shadow_drafting import ShadowSettings
    from policies.trouble.troubles import Troubles

Work = Callable[..., object]
"""Background work. It takes a function without arguments, to call at points where it may be interrupted."""


class Learner:
    """Learns from finished requests."""

    shadow: ShadowSettings | None = None
    """How to replay texts for `observe_shadow`; None for not at all."""
    troubles: Troubles | None = None
    """Troubles found, if the policy prices them; for other policies, candidates with trouble are left out."""

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished request."""

    def left(self, decision: Decision) -> None:
        """Account for a request that left its backend without an outcome: refused, failed, or sent elsewhere."""

    def observe_shadow(self, outcome: Outcome) -> None:
        """Learn from `outcome.shadow`, which is computed some time after `observe` for the same request."""


class Price(NamedTuple):
    """The cost of a request: its own time and the delay of others, in seconds."""

    prompt_s: float
    output_token_s: float
    output_tokens: float  # expected
    prefill_s: float  # of the prompt alone

    def at_s(self, output_tokens: float) -> float:
        """Return the seconds with an answer of `output_tokens` tokens."""
        return self.prompt_s + self.output_token_s * output_tokens

    def expected_s(self) -> float:
        """Return the expected seconds."""
        return self.at_s(self.output_tokens)


class Explainer:
    """Explains decisions, without side effects."""

    explain_candidates: bool = False
    """Whether decisions include the scores of all candidates; set if requests are recorded."""
    guardrail: Guardrail | None = None
    """Its comparison with `least_loaded`, if it makes one."""
    detector: Detector[Any] | None = None
    """Findings about replicas whose behavior changed, if it looks for them."""

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Rate each candidate."""
        return [Assessment(candidate.name, None, "not scored by this policy") for candidate in candidates]

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision | None:
        """Return the decision that `choose` would make now; None if only `choose` of a copy can tell."""

    def price(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Price | None:
        """Return the cost of a request on the best candidate; None if unknown."""


class Maintained:
    """Has work off the request path, or uses a clock."""

    def maintenance(self) -> Work | None:
        """Return background work that is due, or None.

        Called about every half second from the thread that calls `choose`. The work may run in another thread, so it
        must not touch what `choose` and `observe` change, and must publish its results in a single assignment.
        """

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock, which returns seconds and is `time.time` by default; a replay sets its own."""


class Heir:
    """Keeps what it learns as statistics, which are stored and shared, and passed on when its settings change."""

    statistics: Statistics | None = None

    def take_over(self, previous: Policy) -> None:
        """Take over what is useful from another policy of the model; called before the first choice.

        The other policy still observes the requests that it has sent, so shared parts learn from them.
        """


class Informed:
    """Is notified of events at backends."""

    def forget(self, backend: str) -> None:
        """Drop what is known about a backend that has left; another one may get its name."""

    def engine_changed(self, backend: str, change: EngineChange) -> None:
        """Invalidate what was learned about a backend's engine, which has changed."""

    def correct(self, backend: str, factor: float) -> None:
        """Multiply the tokens per step of a backend's answers from now on, to match its engine's counters."""

    def sent_elsewhere(self, backend: str, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Remember the prefixes of a prompt, and their lengths in tokens, sent there by another gateway."""

    def evicted(self, backend: str, unused_s: float | None, is_full: bool) -> None:
        """Forget prefixes unused for this many seconds, by the engine's events; None if it sends none.

        If the cache `is_full`, new blocks evict others.
        """


def check_roles(policy: Policy) -> None:
    """Raise `TypeError` if a policy has a method of a role that it does not inherit: nobody would call it."""
    for role in (Learner, Explainer, Maintained, Heir, Informed):
        methods = [name for name, found in vars(role).items() if callable(found) and hasattr(policy, name)]
        if methods and not isinstance(policy, role):
            kind, name = type(policy).__name__, role.__name__
            raise TypeError(f"{kind} has `{methods[0]}`: derive it from `policies.roles.{name}`, whose method that is")


def assess(policy: Policy, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
    """Rate each candidate, without side effects."""
    explainer = policy if isinstance(policy, Explainer) else Explainer()
    return explainer.assess(request, candidates)


def preview(policy: Policy, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
    """Return the decision that a policy would make now; if it cannot tell, let a copy choose."""
    found = policy.preview(request, candidates) if isinstance(policy, Explainer) else None
    return found or copy.deepcopy(policy).choose(request, candidates)
