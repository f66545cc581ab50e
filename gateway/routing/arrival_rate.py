"""The load of a model: arrivals per second and requests in flight."""

from __future__ import annotations

import math


class Traffic:
    """The load of one model in this gateway process.

    Examples
    --------
    >>> traffic = Traffic(window_s=10.0)
    >>> for second in range(60):
    ...     traffic.arrive(float(second))
    >>> round(traffic.qps(60.0), 2)
    0.95
    """

    __slots__ = ("_at_s", "_rate", "_window_s", "arrived", "in_flight")

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s  # time constant of the arrival rate, in seconds
        self._rate = 0.0
        self._at_s = 0.0
        self.in_flight = 0
        self.arrived = 0  # requests that have arrived

    def arrive(self, now_s: float) -> None:
        """Count an arrival."""
        self._rate = self.qps(now_s) + 1.0 / self._window_s
        self._at_s = now_s
        self.arrived += 1

    def qps(self, now_s: float) -> float:
        """Return the exponentially weighted arrivals per second, an unbiased estimate of a Poisson rate."""
        return self._rate * math.exp((self._at_s - now_s) / self._window_s) if self._rate else 0.0
