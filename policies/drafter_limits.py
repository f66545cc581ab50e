"""Requests beyond a drafter's limit: keeps them away from some replicas, under any policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from backends.backend import Candidate
from backends.drafter_limit import Beyond, DrafterLimit
from policies.features.request import RequestFeatures
from policies.load import per_weight

C = TypeVar("C", bound=Candidate)

_SLACK: Final = 8.0
_RATIO: Final = 1.25
"""As `spill` of `thresholds`: a replica above slack + ratio times the least load counts as overloaded."""


def surviving(request: RequestFeatures, candidates: Sequence[C]) -> Sequence[C]:
    """Return the candidates whose engine a request does not crash, or all if there is none.

    It assumes the longest answer that the request allows, and the longest prompt that is possible.
    """
    tokens = request.most_context_tokens
    exceeded = [(one, _exceeded(one, tokens)) for one in candidates]
    return [one for one, limit in exceeded if limit is None or limit.beyond is not Beyond.CRASH] or candidates


def sparing(request: RequestFeatures, candidates: Sequence[C]) -> Sequence[C]:
    """Return the candidates for a request that would stop the drafts of others in its batch on some of them.

    These are the candidates where it does not, unless they are overloaded. Beyond that, such requests gather on the
    first of the others, in the order of the pool, that is not overloaded either.
    """
    tokens = request.most_context_tokens if request.is_unknown else request.context_tokens
    harmed = [one for one in candidates if (limit := _exceeded(one, tokens)) is not None and limit.harms_others]
    if not harmed:
        return candidates
    groups = [[one for one in candidates if one not in harmed], *[[one] for one in harmed]]
    return next(group for group in groups if group and has_room(group, candidates))


def has_room(group: Sequence[C], candidates: Sequence[C]) -> bool:
    """Return whether any candidate of a group is not overloaded, relative to all."""
    least, least_of_all = (min([per_weight(one, one.in_flight) for one in each]) for each in (group, candidates))
    return least <= _SLACK + _RATIO * least_of_all


def _exceeded(candidate: Candidate, tokens: int) -> DrafterLimit | None:
    """Return the limit of a candidate's drafter if a context of `tokens` tokens exceeds it."""
    limit = candidate.drafter_limit
    return limit if limit is not None and tokens > limit.tokens else None
