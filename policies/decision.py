"""Decisions of a policy, and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.backend import Candidate
from backends.speculation import Method
from policies.features.request import RequestFeatures

# Several of these records are created per request. Compiled by mypyc, an unfrozen class with an explicit `__init__` is
# created in a fiftieth of the time of a frozen dataclass. Treat them as immutable anyway.


@dataclass(slots=True, init=False)
class Decision:
    """The backend that a policy chose for a request, and why.

    Parameters
    ----------
    backend
        Name of the chosen candidate.
    policy
        Name of the policy that decided.
    reason
        One of a small fixed set of words per policy, such as a rule's name or `fewest_in_flight`. It becomes a
        Prometheus label, so it must never contain a number or anything from the request.
    propensity
        Probability of choosing this backend in this situation, in (0, 1]. Off-policy evaluation weights the outcome by
        its inverse [1]_.
    memo
        Private data of the policy, returned to it in the outcome.
    cached_tokens, cached_by
        Prompt tokens that the backend is expected to have cached, and the source of that: `events` of its engine, an
        `estimate`, or empty for a policy without expectations.
    candidates
        The candidates that were scored; empty if the policy reports only its choice. They identify the backends only:
        their load may have changed since the decision.
    predicted_s, propensities
        For each candidate, the predicted seconds to finish, None without a prediction; and the probability of choosing
        it, in [0, 1].
    costs
        For each candidate, what the policy minimizes; empty if not reported.
    arm, arm_chance
        In a comparison: the arm to which the request was assigned, and the probability of that, which the propensities
        include.

    References
    ----------
    .. [1] Horvitz and Thompson, "A Generalization of Sampling Without Replacement from a Finite Universe", Journal of
       the American Statistical Association 47(260), 1952.

    Examples
    --------
    >>> decision = Decision("ngram-0", "least_loaded", "fewest_in_flight", propensity=0.5)
    >>> decision.backend, decision.propensity, decision.candidates
    ('ngram-0', 0.5, ())
    """

    backend: str
    policy: str
    reason: str
    propensity: float
    memo: Any = field(repr=False, compare=False)
    cached_tokens: int
    cached_by: str
    candidates: Sequence[Candidate]
    predicted_s: Sequence[float | None]
    propensities: Sequence[float]
    costs: Sequence[float]
    arm: str
    arm_chance: float

    def __init__(  # noqa: PLR0917 -- a record
        self,
        backend: str,
        policy: str,
        reason: str,
        propensity: float = 1.0,
        memo: Any = None,
        cached_tokens: int = 0,
        cached_by: str = "",
        candidates: Sequence[Candidate] = (),
        predicted_s: Sequence[float | None] = (),
        propensities: Sequence[float] = (),
        costs: Sequence[float] = (),
        arm: str = "",
        arm_chance: float = 1.0,
    ) -> None:
        self.backend = backend
        self.policy = policy
        self.reason = reason
        self.propensity = propensity
        self.memo = memo
        self.cached_tokens = cached_tokens
        self.cached_by = cached_by
        self.candidates = candidates
        self.predicted_s = predicted_s
        self.propensities = propensities
        self.costs = costs
        self.arm = arm
        self.arm_chance = arm_chance

    def __deepcopy__(self, copied: dict[int, object]) -> Decision:
        """Return the decision itself, which is immutable; a compiled class has no other way to be copied."""
        return self


@dataclass(frozen=True, slots=True)
class Assessment:
    """How a policy rates one candidate, as shown by `POST /admin/explain`.

    Parameters
    ----------
    score
        Value that the policy minimizes, in its own unit; None if it does not score this candidate.
    note
        Explanation for a human reader, such as the rule that names the candidate.
    """

    backend: str
    score: float | None
    note: str


@dataclass(slots=True, init=False)
class Outcome:
    """The outcome of a request that was relayed.

    Parameters
    ----------
    status
        HTTP status sent to the client; 499 if the client disconnected first.
    ttft_s
        Seconds from the request's arrival to its first content chunk; None if there was none.
    tpot_s
        Seconds per output token after the first; None for fewer than two tokens.
    e2e_s
        Seconds from the request's arrival to the end of its answer.
    prompt_tokens, output_tokens
        Token counts from the engine's usage report, or estimates if it sent none.
    tokens_per_step
        Output tokens per engine step (accepted + 1); None if unknown.
    drafted_tokens, accepted_tokens
        Draft tokens proposed and accepted; None if unknown.
    cached_tokens
        Prompt tokens found in the engine's prefix cache; None if not reported.
    is_estimated
        Whether `output_tokens` is an estimate, since the engine reported none; `tokens_per_step` is then unknown.
    steps
        Engine steps of an answer whose tokens are an estimate, from the chunks of its stream; None if unknown.
    was_paused
        Whether the client was ever slow to read the answer, so that its times say nothing about the backend.
    shadow
        Tokens per step that shadow drafting reached on the finished text, by arm (see
        `policies.arm.arm_of`).
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
    drafted_tokens: int | None
    accepted_tokens: int | None
    cached_tokens: int | None
    shadow: Mapping[str, float]
    is_estimated: bool
    steps: int | None
    was_paused: bool

    def __init__(  # noqa: PLR0917 -- a record
        self,
        request: RequestFeatures,
        decision: Decision,
        method: Method,
        status: int,
        ttft_s: float | None,
        tpot_s: float | None,
        e2e_s: float,
        prompt_tokens: int,
        output_tokens: int,
        tokens_per_step: float | None,
        drafted_tokens: int | None = None,
        accepted_tokens: int | None = None,
        cached_tokens: int | None = None,
        shadow: Mapping[str, float] | None = None,
        *,
        is_estimated: bool = False,
        steps: int | None = None,
        was_paused: bool = False,
    ) -> None:
        self.request = request
        self.decision = decision
        self.method = method
        self.status = status
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s
        self.e2e_s = e2e_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.tokens_per_step = tokens_per_step
        self.drafted_tokens = drafted_tokens
        self.accepted_tokens = accepted_tokens
        self.cached_tokens = cached_tokens
        self.shadow = shadow if shadow is not None else _NONE
        self.is_estimated = is_estimated
        self.steps = steps
        self.was_paused = was_paused


_NONE: Mapping[str, float] = {}
