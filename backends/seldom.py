"""What is logged once a minute, however often it happens."""

from __future__ import annotations

import math
import time

_INTERVAL_S = 60.0
_MOST_KEYS = 1000


class Seldom:
    """Says when something may be said again, which is once a minute for each key.

    Examples
    --------
    >>> seldom = Seldom()
    >>> seldom.may_say("full"), seldom.may_say("full"), seldom.may_say("slow")
    (True, False, True)
    """

    def __init__(self) -> None:
        self._said_s: dict[object, float] = {}

    def may_say(self, key: object = None) -> bool:
        """Return whether something may be said now, which is then."""
        now_s = time.monotonic()
        if now_s - self._said_s.get(key, -math.inf) < _INTERVAL_S:
            return False
        if len(self._said_s) >= _MOST_KEYS:
            self._said_s.clear()
        self._said_s[key] = now_s
        return True
