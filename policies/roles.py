"""The optional roles of a policy: what it does besides choosing. They are looked up when a model is assembled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from backends.backend import Candidate, EngineChange
from policies.decision import Assessment, Decision, Outcome
from policies.features.request import RequestFeatures
from policies.guarded.guardrail import Guardrail
from policies.learned.shadow_drafting import ShadowSettings
from policies.policy import Policy
from policies.statistics import Statistics
from policies.trouble.troubles import Troubles

Work = Callable[..., object]
"""Background work. It takes a function without arguments, which it calls at points where it may be interrupted."""


@runtime_checkable
class Learner(Protocol):
    """Learns from finished requests."""

    def observe(self, outcome: Outcome) -> None: ...  # noqa: D102


@runtime_checkable
class ShadowLearner(Protocol):
    """Learns from `outcome.shadow`, which is computed some time after `observe` was called for the same request."""

    name: str
    shadow: ShadowSettings

    def observe_shadow(self, outcome: Outcome) -> None: ...  # noqa: D102


@runtime_checkable
class Stateful(Protocol):
    """Keeps what it learns as statistics, which the gateway stores and shares."""

    statistics: Statistics


@runtime_checkable
class Wary(Protocol):
    """Prices what goes wrong with a kind of requests; from other policies, such requests are kept away."""

    troubles: Troubles


@runtime_checkable
class Heir(Protocol):
    """Continues with what another policy of the same model has learned, when the settings of the policy change."""

    def take_over(self, previous: Policy) -> None:
        """Take over what is of use; called before the first choice.

        The other policy still observes the requests that it has sent, and what both share learns from them.
        """


@runtime_checkable
class Forgetful(Protocol):
    """Remembers something of each backend, which it drops when the backend leaves."""

    def forget(self, backend: str) -> None:
        """Drop what is kept of a backend; another one may get its name."""


@runtime_checkable
class CacheWatcher(Protocol):
    """Goes by the prompts that each engine has cached, which all gateways send there."""

    def sent_elsewhere(self, backend: str, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Remember the prefixes of a prompt, and their lengths in tokens, that another gateway has sent."""

    def evicted(self, backend: str, unused_s: float | None, is_full: bool) -> None:
        """Forget what was not used for so many seconds, as an engine tells of its cache; None if it tells nothing.

        If the cache `is_full`, what comes evicts something else.
        """


class Price(NamedTuple):
    """What a request costs: its own time and the delay of others, in seconds."""

    prompt_s: float
    output_token_s: float
    output_tokens: float  # expected
    prefill_s: float  # of the prompt, alone

    def at_s(self, output_tokens: float) -> float:
        """Return the seconds with an answer of so many tokens."""
        return self.prompt_s + self.output_token_s * output_tokens

    def expected_s(self) -> float:
        """Return the expected seconds."""
        return self.at_s(self.output_tokens)


@runtime_checkable
class Pricing(Protocol):
    """Knows what requests cost."""

    def price(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Price:
        """Return what a request costs where that is least."""


@runtime_checkable
class EngineWatcher(Protocol):
    """Judges engines by their answers, which a change of the engine may make obsolete."""

    def engine_changed(self, backend: str, change: EngineChange) -> None: ...  # noqa: D102


@runtime_checkable
class Corrected(Protocol):
    """Learns tokens per step from answers, which may show other ones than the engine counts."""

    def correct(self, backend: str, factor: float) -> None:
        """Multiply the tokens per step of a backend's answers from now on."""


@runtime_checkable
class Explainer(Protocol):
    """Rates the candidates, and returns the decision that `choose` would make now; both change nothing."""

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]: ...  # noqa: D102

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision: ...  # noqa: D102


@runtime_checkable
class Scoring(Protocol):
    """Includes the scores of all candidates in its decisions if told to, which is done when requests are recorded."""

    explain_candidates: bool


@runtime_checkable
class Maintained(Protocol):
    """Has work to do off the request path."""

    name: str

    def warm_up(self) -> None:
        """Import the libraries that learning needs; may be called in any thread, while requests are served."""

    def maintenance(self) -> Work | None:
        """Return background work that is due, or None.

        Called about every half second from the thread that calls `choose`. The work may run in another thread, so it
        must not touch what `choose` and `observe` change, and must publish its results in a single assignment.
        """


@runtime_checkable
class Clocked(Protocol):
    """Has a clock in seconds, by default `time.time`, which a replay replaces."""

    def set_clock(self, clock: Callable[[], float]) -> None: ...  # noqa: D102


class Outliers(Protocol):
    """Knows the backends that perform worse than expected."""

    reasons: dict[str, str]  # in words, by backend


class Silent(Protocol):
    """What is known of a drafter that is silent, as `str` says it in words."""

    cause: str  # a value of `EngineChange`, or `unknown`
    since_s: float
    expected: float  # tokens per step
    observed: float


class Drafters(Protocol):
    """Knows the backends whose drafters are silent."""

    @property
    def silent(self) -> Mapping[str, Silent]:
        """By backend."""


@runtime_checkable
class Freezable(Protocol):
    """Is compared with `least_loaded`, and avoids outliers and silent drafters."""

    name: str
    guardrail: Guardrail

    @property
    def outlier_ejection(self) -> Outliers:
        """The backends that are taken out of use, or count as slow."""

    @property
    def drafters(self) -> Drafters:
        """The backends whose drafts are accepted no more."""


def assess(policy: Policy, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
    """Rate each candidate, without side effects."""
    if isinstance(policy, Explainer):
        return policy.assess(request, candidates)
    return [Assessment(candidate.name, None, "not scored by this policy") for candidate in candidates]


def preview(policy: Policy, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
    """Return the decision that a policy would make now; one that is no `Explainer` is copied and asked."""
    return (policy.preview if isinstance(policy, Explainer) else copy.deepcopy(policy).choose)(request, candidates)
