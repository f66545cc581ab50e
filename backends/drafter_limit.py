"""The longest context that a replica's drafter can serve, and what becomes of requests beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Beyond(StrEnum):
    """What happens when a request's context exceeds the drafter's limit."""

    WORSE = "worse"  # its drafts are accepted less and less
    NONE = "none"  # it alone gets no drafts
    BATCH = "batch"  # the whole batch verifies dummies, and none is accepted
    CRASH = "crash"  # the engine ends


@dataclass(frozen=True, slots=True)
class DrafterLimit:
    """The limit of one replica's drafter.

    Examples
    --------
    >>> DrafterLimit(2048).harms_others, DrafterLimit(2048, Beyond.WORSE).harms_others
    (True, False)
    """

    tokens: int  # of prompt and answer together
    beyond: Beyond = Beyond.BATCH

    @property
    def harms_others(self) -> bool:
        """Whether one request beyond the limit costs those beside it."""
        return self.beyond in (Beyond.BATCH, Beyond.CRASH)

    @property
    def consequence(self) -> str:
        """What happens beyond the limit, in words."""
        return {
            Beyond.WORSE: "the drafts of such a request are accepted less and less",
            Beyond.NONE: "such a request gets no drafts",
            Beyond.BATCH: "no draft of the whole batch is accepted while such a request runs",
            Beyond.CRASH: "such a request may end the engine",
        }[self.beyond]

    def note_on(self, prompt_tokens: int, answer_tokens: int = 0) -> str:
        """Return what is to be said of a request with so long a prompt and, at most, answer; "" if it fits.

        Examples
        --------
        >>> DrafterLimit(2048, Beyond.NONE).note_on(1900, 200)
        "may grow beyond its drafter's 2,048 tokens: such a request gets no drafts"
        """
        if prompt_tokens + answer_tokens <= self.tokens:
            return ""
        verb = "is" if prompt_tokens > self.tokens else "may grow"
        return f"{verb} beyond its drafter's {self.tokens:,} tokens: {self.consequence}"
