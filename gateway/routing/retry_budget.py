"""The retry budget of a model: when everything fails, retries must not double the load."""

from __future__ import annotations

import math
from typing import Final

from gateway.routing.arrival_rate import Traffic

_SHARE: Final = 0.2
"""Retries per request in the long run."""
_PER_S: Final = 1.0
"""Retries per second that are allowed besides, for a model with little traffic."""
_RESERVE: Final = 10.0
"""What can be saved up beyond the requests in flight."""


class RetryBudget:
    """How many more requests of a model may be sent a second time.

    Each request adds a fifth of a retry and each second one, as in Finagle's budgets [1]_. As many can be saved up as
    there are requests in flight, and ten more: all requests of a replica that dies may be retried.

    References
    ----------
    .. [1] Finagle, `com.twitter.finagle.service.RetryBudget`.

    Examples
    --------
    >>> traffic = Traffic()
    >>> budget = RetryBudget(traffic)
    >>> [budget.take(0.0) for _ in range(11)].count(True), budget.take(0.5), budget.take(1.0)
    (10, False, True)
    >>> for _ in range(10):
    ...     traffic.arrive(1.0)
    >>> [budget.take(1.0) for _ in range(3)]
    [True, True, False]
    """

    __slots__ = ("_arrived", "_at_s", "_level", "_traffic")

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._level = math.inf
        self._arrived = 0
        self._at_s = 0.0

    def take(self, now_s: float) -> bool:
        """Take one retry from the budget; return whether there was one left."""
        traffic = self._traffic
        earned = _SHARE * (traffic.arrived - self._arrived) + _PER_S * (now_s - self._at_s)
        self._level = min(self._level + earned, _RESERVE + traffic.in_flight)
        self._arrived, self._at_s = traffic.arrived, now_s
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True
