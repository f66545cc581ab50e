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
