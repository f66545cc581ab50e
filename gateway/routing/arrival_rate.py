"""How busy a model is: arrivals per second and requests under way."""

from __future__ import annotations

import math


class Traffic:
    """The load of one model, as its own gateway process sees it.

    Parameters
    ----------
    window_s
        Time constant of the arrival rate: what is older than a few of it no longer counts.

    Attributes
    ----------
    in_flight
        Requests under way.
    """

    __slots__ = ("_at_s", "_rate", "_window_s", "in_flight")

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._rate = 0.0
        self._at_s = 0.0
        self.in_flight = 0

    def arrive(self, now_s: float) -> None:
        """Take note of an arrival."""
        self._rate = self.qps(now_s) + 1.0 / self._window_s
        self._at_s = now_s

    def qps(self, now_s: float) -> float:
        """Return the arrivals per second: an exponentially weighted rate, which estimates a Poisson rate unbiased."""
        return self._rate * math.exp((self._at_s - now_s) / self._window_s) if self._rate else 0.0
