"""Steps without drafts: those of a request beyond its drafter's limit, and of others in its batch."""

from __future__ import annotations

import math
from typing import Final

from backends.drafter_limit import Beyond, DrafterLimit
from policies.decision import Outcome
from policies.features.request import RequestFeatures


class Reach:
    """The contexts that a backend's drafter serves."""

    def __init__(self, k: float, *, may_have_limit: bool) -> None:
        self._k = k
        # Longest prompt known to get drafts if no limit is declared; infinite if there can be none.
        self._proven_tokens = _LEAST_LIMIT if may_have_limit else math.inf
        self.per_step = 0.0  # tokens per step of recent answers, if it has a limit; 0.0 if unknown
        self.read(None)

    def read(self, limit: DrafterLimit | None) -> None:
        """Replace the limit."""
        self.is_known = limit is not None
        self.harms_others = limit is None or limit.harms_others  # an unknown limit may
        self._tokens = math.inf if limit is None or limit.beyond is _WORSE else limit.tokens - self._k

    def expected(self, request: RequestFeatures, tokens: float) -> tuple[float, float]:
        """Return how many of an answer's `tokens` get no drafts, and after how many tokens that may begin.

        The latter is infinite if it cannot, or does not affect others in the batch.
        """
        if self._tokens == math.inf:
            return 0.0, 0.0 if request.prompt_tokens > self._proven_tokens and not self.is_known else math.inf
        room = max(0.0, self._tokens - request.prompt_tokens)
        if request.max_tokens is not None and request.max_tokens <= room:
            return 0.0, math.inf
        # However long an answer already is, as many more tokens are expected: recorded ones are closest to that. If it
        # is more likely to stay within the limit, it costs nothing: such a price would drive too many requests away.
        beyond = math.exp(-room / tokens)
        return tokens * beyond if beyond >= _LIKELY else 0.0, room if self.harms_others else math.inf

    def taken(self, undrafted: float, left: float, requests: int, per_step: float) -> float:
        """Return the steps that others lose: for as many requests as now, since new ones replace those that end.

        They lose none while another request already stops their drafts, which lasts for the steps `left`.
        """
        usual = self.per_step or per_step
        return (1.0 - 1.0 / usual) * requests * (undrafted - _shared(undrafted, left)) if self.harms_others else 0.0

    def is_beyond(self, outcome: Outcome) -> bool:
        """Return whether a request exceeded the limit, or may have exceeded an unknown one."""
        if self.is_known:
            return outcome.prompt_tokens + outcome.output_tokens / outcome.request.n > self._tokens
        if outcome.prompt_tokens > self._proven_tokens and (outcome.tokens_per_step or 1.0) >= _DRAFTED:
            self._proven_tokens = float(outcome.prompt_tokens)
        return outcome.prompt_tokens > self._proven_tokens


def steps_of(tokens: float, undrafted: float, left: float, per_step: float) -> float:
    """Return the steps of an answer, if some tokens get no drafts, nor any others for the steps `left`."""
    drafted = tokens - undrafted
    drafted -= _shared(drafted, left)
    return max(1.0, tokens - drafted + drafted / per_step)


def _shared(steps: float, others: float) -> float:
    """Return the steps that two requests share, given the mean steps that each has left."""
    return steps * others / (steps + others) if others > 0.0 else 0.0


_WORSE: Final = Beyond.WORSE
_LEAST_LIMIT: Final = 2048.0
"""Context that any drafter is assumed to serve: that of the first EAGLE heads."""
_LIKELY: Final = 0.5
_DRAFTED: Final = 1.05
"""Tokens per step of an answer that had drafts."""
