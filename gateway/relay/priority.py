"""The `priority` of a request, with vLLM's convention: lower ones are served first, and 0 is the default."""

from __future__ import annotations

import math
from typing import Final

_LARGEST: Final = 2**31 - 1


def rank_of(key_priority: int, sent: object) -> int:
    """Return the rank of a request in the queue.

    A request can only lower its rank below that of its key: else all would claim the highest.

    Examples
    --------
    >>> rank_of(0, None), rank_of(0, 5), rank_of(10, -20), rank_of(-10, 3)
    (0, 5, 10, -7)
    """
    if isinstance(sent, bool) or not isinstance(sent, int | float) or not math.isfinite(sent):
        return key_priority
    return key_priority + int(min(max(sent, 0), _LARGEST - abs(key_priority)))
