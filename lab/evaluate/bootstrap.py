"""Confidence intervals for what is made of sums over a log whose neighbouring requests resemble each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 1000
MOST_BLOCKS = 2000
_FEWEST_BLOCKS = 20
_Z = 1.959964  # of the normal distribution, for 95%


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float


def block_length(requests: int) -> int:
    """Return how many consecutive requests are resampled together.

    The cube root of their number: blocks that grow with the log, and more slowly than it, keep what neighbours share
    (Kuensch, "The Jackknife and the Bootstrap for General Stationary Observations", Annals of Statistics 17(3), 1989).
    """
    return max(1, round(math.cbrt(requests)), math.ceil(requests / MOST_BLOCKS))


def block_sums(values: npt.ArrayLike, length: int) -> Floats:
    """Return the sums of runs of `length` values; the last run may be shorter."""
    array = np.asarray(values, np.float64)
    return np.add.reduceat(array, np.arange(0, len(array), length))


@lru_cache(maxsize=2)  # a log is told of in many intervals, and drawing takes longer than all else
def _drawn(count: int, seed: int) -> Floats:
    """Return how often each of `count` blocks is in each resample, shape (RESAMPLES, count)."""
    found = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(np.float64)
    found.flags.writeable = False
    return found


def interval(up: Sequence[Floats], down: Sequence[Floats], seed: int = 0) -> Interval:
    """Return a product of sums over a product of as many sums, with its interval, by a studentised block bootstrap.

    On the scale of the logarithm, on which a ratio of positive sums is more nearly normal: blocks are drawn with
    replacement, and how far each such estimate is off, either way and in its own standard errors, tells how far the one
    at hand may be from the truth (Hall, "On Symmetric Bootstrap Confidence Intervals", JRSS B 50(1), 1988). Of the
    intervals tried it covered best where few requests carry much weight.

    Parameters
    ----------
    up, down
        Sums of each block, shape (blocks,) each; as many in `up` as in `down`.

    Raises
    ------
    ValueError
        If there are too few blocks, or a sum is not positive.
    """
    blocks = np.stack([*up, *down])
    signs = np.array([1.0] * len(up) + [-1.0] * len(down))
    count = blocks.shape[1]
    if count < _FEWEST_BLOCKS:
        raise ValueError(f"{count} blocks of requests are too few to tell an interval from; {_FEWEST_BLOCKS} at least")
    totals = blocks.sum(axis=1)
    if (totals <= 0).any():
        raise ValueError("a sum that is not positive has no logarithm")
    products = np.einsum("ig,jg->gij", blocks, blocks).reshape(count, -1)
    drawn = _drawn(count, seed)
    resampled = drawn @ blocks.T
    usable = (resampled > 0).all(axis=1)
    resampled, squares = resampled[usable], (drawn[usable] @ products)
    value = float(signs @ np.log(totals))
    error = float(_errors(totals[None], products.sum(axis=0)[None], signs)[0])
    distances = np.abs(np.log(resampled) @ signs - value) / np.maximum(_errors(resampled, squares, signs), 1e-12)
    reach = float(np.quantile(distances, 0.95)) * error
    return Interval(math.exp(value), math.exp(value - reach), math.exp(value + reach))


def _errors(totals: Floats, squares: Floats, signs: Floats) -> Floats:
    """Return the standard error of each estimate on the scale of the logarithm, shape (estimates,), by linearising it.

    Parameters
    ----------
    totals
        Its sums, shape (estimates, sums).
    squares
        Sums of the products of two, shape (estimates, sums * sums).
    """
    slopes = signs / totals
    matrices = squares.reshape(len(totals), len(signs), len(signs))
    variances: Floats = np.einsum("bi,bij,bj->b", slopes, matrices, slopes)
    return np.sqrt(np.maximum(variances, 0.0))


def weighted_quantile(values: Floats, weights: Floats, probability: float, length: int) -> Interval:
    """Return a quantile of weighted values with its interval (Woodruff, JASA 47(260), 1952).

    The interval of the share of weight below the quantile, read off as quantiles: no density need be estimated.

    Parameters
    ----------
    values
        In the order of the log, shape (requests,).
    length
        Requests to a block.
    """
    order = np.argsort(values, kind="stable")
    shares = np.cumsum(weights[order]) / weights.sum()

    def at(share: float) -> float:
        return float(values[order[min(int(np.searchsorted(shares, share)), len(order) - 1)]])

    value = at(probability)
    residuals = block_sums(weights * ((values <= value) - probability), length)
    error = math.sqrt(float(residuals @ residuals)) / float(weights.sum())
    return Interval(value, at(max(0.0, probability - _Z * error)), at(min(1.0, probability + _Z * error)))
