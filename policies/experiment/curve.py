"""What blocks of time show of two arms that served side by side: their ratio, by load, and where it crosses 1."""

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
    work_per_s: float  # that arrives at each replica
    ratio: float  # seconds that the first arm takes over those of the second
    low: float
    high: float


class Crossing(NamedTuple):
    """Requests in flight per replica from which on the other arm is the better one."""

    in_flight: float
    low: float  # at the lowest load seen or below, if that is it
    high: float  # at the highest load seen or above, if that is it
    better_below: int  # the arm that is better at less


@dataclass(frozen=True, slots=True)
class Fit:
    """How many seconds both arms take per unit of work, by the work that arrives.

    Where both arms serve side by side, each block shows both, under the same traffic. With the logarithms y of seconds
    per unit of work and x of the work that arrived per replica, as difference from its mean, an arm is taken to follow

        y = g + s (d + b1 x + b2 x^2) + c1 x + c2 x^2,      s = 1/2 for the first arm, -1/2 for the second,

    where g belongs to a group of neighbouring blocks, so that slow changes of the traffic cancel. At a load x the first
    takes exp(d + b1 x + b2 x^2) times the seconds of the second. What arrives is no effect of how it is served, as the
    requests in flight are; and arms that cross in the one cross in the other, for these are y + x. Deviations within a
    block, or within the blocks in which conversations stay, may depend on each other: the covariance is that of
    clusters [1]_. Where arms take turns, a block has one
    only, and all deviations are taken to be alike: one arm may have so few blocks that they do not show their own.

    References
    ----------
    .. [1] Cameron and Miller, "A Practitioner's Guide to Cluster-Robust Inference", Journal of Human Resources 50(2),
       2015.
    """

    difference: Floats  # d, b1, b2, shape (3,); those without evidence are 0
    covariance: Floats  # of these, shape (3, 3)
    freedom: float
    common: Floats  # g in the mean, c1, c2, shape (3,)
    mean_powers: Floats  # 1, x and x^2 in the mean, by the time that requests take, shape (3,)
    in_flight: float  # requests per replica, in the mean
    work_per_s: float  # that arrives at each replica, in the mean
    x_mean: float
    x_low: float
    x_high: float

    def at(self, x: float, confidence: float) -> Point:
        """Return how both compare where so much work arrives (x as above)."""
        powers = np.array([1.0, x, x * x])
        work = math.exp(x + self.x_mean)
        return Point(work * math.exp(float(powers @ self.common)), work, *self._ratio(powers, confidence))

    def overall(self, confidence: float) -> Point:
        """Return the ratio of the mean times under the traffic seen, of which busy times make up the most."""
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
        """Its variance."""
        return self._variance(self.mean_powers)

    def curve(self, confidence: float, points: int = 9) -> list[Point]:
        """Return how both compare from the lowest to the highest load seen."""
        return [self.at(float(x), confidence) for x in np.linspace(self.x_low, self.x_high, points)]

    def crossing(self, confidence: float) -> Crossing | None:
        """Return where both are equal; None if that is not shown to lie within the loads seen."""
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
    """What one arm took in a block of time."""

    number: int  # of the block
    arm: int  # 0 for the first, 1 for the second
    seconds_per_work: float
    work_per_s: float  # that arrived at each replica


def fit(rows: Sequence[Row], stays: int = 1) -> Fit | None:
    """Return what blocks show; None while they are too few.

    Parameters
    ----------
    stays
        Neighbouring blocks that may depend on each other, since they have the same conversations.
    """
    blocks, block = np.unique([row.number for row in rows], return_inverse=True)
    both = len(rows) - len(blocks)  # blocks that have both
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
        """Return values less their mean in the group, so that g need not be fitted."""
        return values - (np.bincount(group, values) / np.bincount(group))[group]

    shown = fewer if in_turns else count
    terms = 3 if shown >= _QUADRATIC_FROM else 2 if shown >= _SLOPES_FROM else 1
    powers = x[:, None] ** np.arange(3)
    in_flight = np.exp(y + x + x_mean)
    # The slope that both have in common is fitted from the first: what arrives is never quite the same at both.
    parts = [powers[:, :terms] * np.where(arms, -0.5, 0.5)[:, None], powers[:, 1 : max(2, terms)]]
    columns = np.concatenate(parts, axis=1)
    design = np.apply_along_axis(within, 0, columns)
    inverse = np.linalg.pinv(design.T @ design)
    solution = inverse @ design.T @ y
    deviations = within(y) - design @ solution
    # Where both arms share their blocks, what these have in common costs no freedom of the difference.
    freedom = count - terms - 1.0 - (len(groups) if in_turns else 0)
    if freedom < 1.0:
        return None
    if in_turns:
        covariance = inverse * (deviations @ deviations / freedom)
    else:
        scores = np.zeros((count, design.shape[1]))
        np.add.at(scores, cluster, design * deviations[:, None])
        covariance = inverse @ (scores.T @ scores) @ inverse * (count / freedom)
        # The mean of logarithms is below the logarithm of the mean by half their variance, more so of few requests.
        first, second = (np.mean(deviations[arms == arm] ** 2) for arm in (0, 1))
        solution[0] += (first - second) / 2.0
    difference, matrix, common = np.zeros(3), np.zeros((3, 3)), np.zeros(3)
    difference[:terms], matrix[:terms, :terms] = solution[:terms], covariance[:terms, :terms]
    common[1 : 1 + len(solution) - terms] = solution[terms:]
    common[0] = float((y - columns @ solution).mean())
    # Loads at which both have been seen.
    low, high = np.array([np.quantile(x[arms == arm], [_SEEN, 1.0 - _SEEN]) for arm in (0, 1)]).T
    # Without what is explored: where one arm of a block had more, the other had less.
    shared_x, weights = (np.bincount(block, each) / np.bincount(block) for each in (x, np.log(in_flight)))
    mean_powers = np.average(shared_x[:, None] ** np.arange(3), axis=0, weights=np.exp(weights))
    work = float(np.exp(x + x_mean).mean())
    means = mean_powers, float(in_flight.mean()), work, x_mean
    return Fit(difference, matrix, freedom, common, *means, float(low.max()), float(high.min()))


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, _LARGEST))


GROUP: Final = 12
"""Neighbouring blocks that have much the same traffic."""
_LEAST_BLOCKS: Final = 4
_LEAST_IN_TURNS: Final = 2
_SLOPES_FROM: Final = 12
_QUADRATIC_FROM: Final = 36
"""Blocks from which on the difference may depend on the load, and on its square."""
_SEEN: Final = 0.05
"""Share of the blocks at each end that show no load well enough."""
_FINE: Final = 400
_LEAST_VARIANCE: Final = 1e-8
_LARGEST: Final = 50.0
