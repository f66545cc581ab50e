"""What a policy decides, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.backend import Candidate
from backends.speculation import Method
from policies.features.request import RequestFeatures

# Not frozen, and with an `__init__` that is written out: several are made for each request, and a compiled class
# makes them in a fiftieth of the time so. Nobody changes one all the same.


@dataclass(slots=True, init=False)
class CandidateScores:
    """What a policy thought of the candidates that a decision chose among: a place in each list for each of them.

    Parameters
    ----------
    candidates
        To tell who they are; how busy they were is not to be read from them later.
    predicted_s
        What the policy expects the request to take there, in seconds; None where it expects nothing.
    propensities
        Probability with which each was to be chosen, in [0, 1].
    """

    candidates: Sequence[Candidate]
    predicted_s: Sequence[float | None]
    propensities: Sequence[float]

    def __init__(
        self, candidates: Sequence[Candidate], predicted_s: Sequence[float | None], propensities: Sequence[float]
    ) -> None:
        self.candidates = candidates
        self.predicted_s = predicted_s
        self.propensities = propensities


@dataclass(slots=True, init=False)
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
        All candidates, for the record; None where the policy tells only of the chosen one.
    memo
        For the policy itself: it finds it again in the outcome.
    """

    backend: str
    policy: str
    reason: str
    propensity: float
    considered: CandidateScores | None
    memo: Any = field(repr=False, compare=False)

    def __init__(
        self,
        backend: str,
        policy: str,
        reason: str,
        propensity: float = 1.0,
        considered: CandidateScores | None = None,
        memo: Any = None,
    ) -> None:
        self.backend = backend
        self.policy = policy
        self.reason = reason
        self.propensity = propensity
        self.considered = considered
        self.memo = memo

    def __deepcopy__(self, copied: dict[int, object]) -> Decision:
        """Return itself, for nobody changes it; a compiled class cannot be copied otherwise."""
        return self


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


@dataclass(slots=True, init=False)
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
        `policies.learned.models.acceptance.arm_of`).
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


_NONE: Mapping[str, float] = {}
