"""Compares two arms by blocks of time: their ratio, by load, and where it crosses 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from policies.experiment.interval import margin_at_any_time

Floats = npt.NDArray[np.float64]


class Point(NamedTuple):
    """A load, and how both arms compare there."""

    in_flight: float  # requests per replica
    work_per_s: float  # arriving at each replica
    ratio: float  # seconds of the first arm over those of the second
    low: float
    high: float


class Crossing(NamedTuple):
    """Requests in flight per replica from which on the other arm is better."""

    in_flight: float
    low: float  # at the lowest load seen or below, if that is it
    high: float  # at the highest load seen or above, if that is it
    better_below: int  # the arm that is better below


@dataclass(frozen=True, slots=True)
class Fit:
    """The seconds per unit of work of both arms, as a function of the arriving work.

    If both arms serve side by side, each block shows both, under the same traffic. With the logarithms y of seconds per
    unit of work and x of the work that arrived per replica, minus its mean, the model of an arm is

        y = g + s (d + b1 x + b2 x^2) + c1 x + c2 x^2,      s = 1/2 for the first arm, -1/2 for the second,

    where g belongs to a group of neighboring blocks, so that slow changes of the traffic cancel. At a load x the first
    takes exp(d + b1 x + b2 x^2) times the seconds of the second. Unlike requests in flight, arrivals do not depend on
    how they are served; and arms that cross in one cross in the other, since requests in flight are y + x. Deviations
    within a block, or within blocks that share conversations, may be correlated: the covariance is that of clusters
    [1]_. If arms take turns, a block has only one, and all deviations are assumed equal in variance: one arm may have
    too few blocks to show its own.

    References
    ----------
    .. [1] Cameron and Miller, "A Practitioner's Guide to Cluster-Robust Inference", Journal of Human Resources 50(2),
       2015.
    """

    difference: Floats  # d, b1, b2, shape (3,); those without evidence are 0
    covariance: Floats  # of these, shape (3, 3)
    freedom: float
    common: Floats  # mean of g, c1, c2, shape (3,)
    mean_powers: Floats  # means of 1, x and x^2, weighted by the time of requests, shape (3,)
    in_flight: float  # mean requests per replica
    work_per_s: float  # mean work arriving at each replica
    x_mean: float
    x_low: float
    x_high: float

    def at(self, x: float, confidence: float) -> Point:
        """Return how both compare at a load x (as above)."""
        powers = np.array([1.0, x, x * x])
        work = math.exp(x + self.x_mean)
        return Point(work * math.exp(float(powers @ self.common)), work, *self._ratio(powers, confidence))

    def overall(self, confidence: float) -> Point:
        """Return the ratio of the mean times under the observed traffic, in which busy times weigh most."""
        return Point(self.in_flight, self.work_per_s, *self._ratio(self.mean_powers, confidence))

    def _ratio(self, powers: Floats, confidence: float) -> tuple[float, float, float]:
        log_ratio = float(powers @ self.difference)
        margin = margin_at_any_time(self._variance(powers), confidence, self.freedom)
        return math.exp(log_ratio), _exp(log_ratio - margin), _exp(log_ratio + margin)

    def _variance(self, powers: Floats) -> float:
        return max(_LEAST_VARIANCE, float(powers @ self.covariance @ powers))

    @property
    def log_ratio(self) -> float:
        """Logarithm of the overall ratio."""
        return float(self.mean_powers @ self.difference)

    @property
    def log_variance(self) -> float:
        """Variance of `log_ratio`."""
        return self._variance(self.mean_powers)

    def curve(self, confidence: float, points: int = 9) -> list[Point]:
        """Return how both compare, from the lowest to the highest observed load."""
        return [self.at(float(x), confidence) for x in np.linspace(self.x_low, self.x_high, points)]

    def crossing(self, confidence: float) -> Crossing | None:
        """Return where both are equal; None unless that provably lies within the observed loads."""
        points = self.curve(confidence, _FINE)
        below, above = points[0], points[-1]
        if not (below.high < 1.0 < above.low or above.high < 1.0 < below.low):
            return None
        sign = 1.0 if below.ratio < 1.0 else -1.0
        at = next(point for point in points if sign * (point.ratio - 1.0) >= 0.0)
        open_points = [point.in_flight for point in points if point.low <= 1.0 <= point.high]
        low, high = min([*open_points, at.in_flight]), max([*open_points, at.in_flight])
        return Crossing(at.in_flight, low, high, 0 if sign > 0 else 1)


class Row(NamedTuple):
    """One arm in a block of time."""

    number: int  # of the block
    arm: int  # 0 for the first, 1 for the second
    seconds_per_work: float
    work_per_s: float  # that arrived at each replica


def fit(rows: Sequence[Row], stays: int = 1) -> Fit | None:
    """Fit blocks; return None while they are too few.

    Parameters
    ----------
    stays
        Number of neighboring blocks that may be correlated, since they share conversations.
    """
    blocks, block = np.unique([row.number for row in rows], return_inverse=True)
    both = len(rows) - len(blocks)  # blocks with both
    arms = np.array([row.arm for row in rows], dtype=int)
    fewer, in_turns = int(np.bincount(arms, minlength=2).min()), both <= len(blocks) // 2
    if fewer < (_LEAST_IN_TURNS if in_turns else _LEAST_BLOCKS):
        return None
    clusters, cluster = np.unique(blocks[block] // stays, return_inverse=True)
    count = len(clusters)
    y = np.log([row.seconds_per_work for row in rows])
    x = np.log([row.work_per_s for row in rows])
    x_mean = float(x.mean())
    x = x - x_mean
    groups, group = np.unique(blocks[block] // GROUP, return_inverse=True)

    def within(values: Floats) -> Floats:
        """Return values minus their group mean, so that g need not be fitted."""
        return values - (np.bincount(group, values) / np.bincount(group))[group]

    shown = fewer if in_turns else count
    terms = 3 if shown >= _QUADRATIC_FROM else 2 if shown >= _SLOPES_FROM else 1
    powers = x[:, None] ** np.arange(3)
    in_flight = np.exp(y + x + x_mean)
    # The common slope is fitted from the start: arrivals are never quite equal at both.
    parts = [powers[:, :terms] * np.where(arms, -0.5, 0.5)[:, None], powers[:, 1 : max(2, terms)]]
    columns = np.concatenate(parts, axis=1)
    design = np.apply_along_axis(within, 0, columns)
    inverse = np.linalg.pinv(design.T @ design)
    solution = inverse @ design.T @ y
    deviations = within(y) - design @ solution
    # If both arms share their blocks, the common part costs the difference no degrees of freedom.
    freedom = count - terms - 1.0 - (len(groups) if in_turns else 0)
    if freedom < 1.0:
        return None
    if in_turns:
        covariance = inverse * (deviations @ deviations / freedom)
    else:
        scores = np.zeros((count, design.shape[1]))
        np.add.at(scores, cluster, design * deviations[:, None])
        covariance = inverse @ (scores.T @ scores) @ inverse * (count / freedom)
        # The mean of logarithms is below the logarithm of the mean by half their variance, more so with few requests.
        first, second = (np.mean(deviations[arms == arm] ** 2) for arm in (0, 1))
        solution[0] += (first - second) / 2.0
    difference, matrix, common = np.zeros(3), np.zeros((3, 3)), np.zeros(3)
    difference[:terms], matrix[:terms, :terms] = solution[:terms], covariance[:terms, :terms]
    common[1 : 1 + len(solution) - terms] = solution[terms:]
    common[0] = float((y - columns @ solution).mean())
    # Loads at which both were observed.
    low, high = np.array([np.quantile(x[arms == arm], [_SEEN, 1.0 - _SEEN]) for arm in (0, 1)]).T
    # Exploration cancels: if one arm of a block got more, the other got less.
    shared_x, weights = (np.bincount(block, each) / np.bincount(block) for each in (x, np.log(in_flight)))
    mean_powers = np.average(shared_x[:, None] ** np.arange(3), axis=0, weights=np.exp(weights))
    work = float(np.exp(x + x_mean).mean())
    means = mean_powers, float(in_flight.mean()), work, x_mean
    return Fit(difference, matrix, freedom, common, *means, float(low.max()), float(high.min()))


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, _LARGEST))


GROUP: Final = 12
"""Neighboring blocks with much the same traffic."""
_LEAST_BLOCKS: Final = 4
_LEAST_IN_TURNS: Final = 2
_SLOPES_FROM: Final = 12
_QUADRATIC_FROM: Final = 36
"""Blocks from which the difference may depend on the load and on its square."""
_SEEN: Final = 0.05
"""Share of blocks at each end of the load that is too sparse."""
_FINE: Final = 400
_LEAST_VARIANCE: Final = 1e-8
_LARGEST: Final = 50.0
