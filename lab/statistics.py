"""The lab's intervals and percentiles.

Requests of one run share queues and batches. They are correlated for as long as a queue lasts, which near saturation is
longer than most runs, so no interval uses the spread of requests. Its units must be independent: simulations of other
traffic, windows that start idle, or parts of a run that are long compared with its longest request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STATISTICS: Final = ("mean", "p50", "p90", "p99")
TIMES: Final = (("e2e_s", "e2e, s", 1.0), ("ttft_s", "ttft, s", 1.0), ("tpot_s", "tpot, ms", 1e3))
"""Times of requests, their column headings, and their factors from seconds."""
REPLICATIONS: Final = 6
"""Simulations of other traffic for an interval; with more, Student's t is hardly smaller."""

_FEW_REQUESTS = 100_000
"""Most requests to simulate for intervals by default: a few seconds."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% interval, whose ends are infinite if the data allow none.

    Examples
    --------
    >>> Interval(1.0, 0.9, 1.1).is_known, Interval(1.0).is_known
    (True, False)
    """

    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_known(self) -> bool:
        """Whether it has ends."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def less_one(self) -> Interval:
        """Return a ratio as a relative difference."""
        return Interval(self.value - 1.0, self.low - 1.0, self.high - 1.0)

    def saved(self) -> Interval:
        """Return a ratio as the share saved."""
        return Interval(1.0 - self.value, 1.0 - self.high, 1.0 - self.low)


def replications_of(given: int | None, requests: int) -> int:
    """Return the number of replications, each of `requests` requests: as given, else few or none.

    Examples
    --------
    >>> replications_of(None, 1_000), replications_of(None, 1_000_000), replications_of(3, 1_000_000)
    (6, 0, 3)
    """
    return given if given is not None else REPLICATIONS * (REPLICATIONS * requests <= _FEW_REQUESTS)


def of_replications(ratio: float, replications: Sequence[float]) -> Interval:
    """Return a ratio with the interval from its replications on other traffic.

    Notes
    -----
    Student's t on the logarithms, with the spread of the replications, around the ratio itself: traffic resampled from
    a trace has the spread of the traffic that the trace samples, but not its mean.

    References
    ----------
    Law and Kelton, "Simulation Modeling and Analysis", chapter 9 (independent replications); Efron and Tibshirani, "An
    Introduction to the Bootstrap", 1993, chapter 8.

    Examples
    --------
    >>> of_replications(0.9, [0.9] * 8)
    Interval(value=0.9, low=0.9, high=0.9)
    """
    if len(replications) < 2:
        return Interval(ratio)
    return _around(ratio, stdev(map(math.log, replications)), len(replications))


def of_units(up: Floats, down: Floats) -> Interval:
    """Return the ratio of two sums, with the interval from independent units.

    Notes
    -----
    Student's t on the logarithm, linearized by unit: what a unit's two sums share does not widen it.

    Examples
    --------
    >>> of_units(np.full(8, 3.0), np.full(8, 3.0))
    Interval(value=1.0, low=1.0, high=1.0)
    """
    totals, units = np.array([up.sum(), down.sum()]), len(up)
    if (totals <= 0).any():
        raise ValueError("the sums must be positive")
    signs = np.array([1.0, -1.0])
    ratio = math.exp(float(signs @ np.log(totals)))
    if units < 2:
        return Interval(ratio)
    shares = (signs / totals) @ np.stack([up, down])
    return _around(ratio, math.sqrt(float(shares @ shares) * units / (units - 1)), units)


def _around(ratio: float, error: float, units: int) -> Interval:
    """Return the interval of a ratio whose logarithm has this standard error, from `units` units."""
    from scipy.stats import t  # takes a while to import

    reach = float(t.ppf(0.975, units - 1)) * error
    return Interval(ratio, ratio * math.exp(-reach), ratio * math.exp(reach))


def cell(value: float | None, form: str = ".3f", factor: float = 1.0) -> str:
    """Return a figure as text; a dash for None."""
    return "-" if value is None else f"{factor * value:{form}}"


def summary(values: Floats) -> dict[str, float | None]:
    """Return mean, median, 90th and 99th percentile (linear interpolation) without NaN; each None without values.

    Examples
    --------
    >>> summary(np.array([1.0, 2.0, 3.0, np.nan]))
    {'mean': 2.0, 'p50': 2.0, 'p90': 2.8, 'p99': 2.98}
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(STATISTICS)
    return dict(zip(STATISTICS, (float(values.mean()), *np.percentile(values, (50, 90, 99)).tolist()), strict=True))
