"""Coverage of intervals on samples with a known truth."""

from __future__ import annotations

import numpy as np
import pytest

from lab.evaluate.bootstrap import block_length, block_sums, interval, weighted_quantile

SIMULATIONS = 120


def _covered(hits: int) -> None:
    """Check for 95% coverage within three standard errors."""
    assert 0.89 <= hits / SIMULATIONS < 1


def test_blocks_cover_all_values_and_grow_slowly() -> None:
    values = np.arange(10.0)
    assert block_sums(values, 4).tolist() == [6.0, 22.0, 17.0]
    assert block_length(1000) == 10
    assert block_length(1_000_000) == 500  # no more than 2000 blocks


@pytest.mark.slow
def test_intervals_of_weighted_means_have_their_coverage() -> None:
    """Long-tailed times, a tenth of them with ten times the weight, as in a log with 10% exploration."""
    hits = {"ips": 0, "snips": 0}
    length = block_length(2000)
    for seed in range(SIMULATIONS):
        rng = np.random.default_rng((seed, 5))
        rare = rng.random(2000) < 0.1
        weight = np.where(rare, 10.0, 0.0)
        times = rng.lognormal(-0.32, 0.8, 2000)  # of mean 1
        up, ones, weights = (block_sums(one, length) for one in (weight * times, np.ones(2000), weight))
        for name, down in (("ips", ones), ("snips", weights)):
            seen = interval([up], [down], seed)
            assert seen.low < seen.value < seen.high
            hits[name] += seen.low <= 1.0 <= seen.high
    for count in hits.values():
        _covered(count)


@pytest.mark.slow
def test_correlated_neighbors_widen_the_interval() -> None:
    """Half of the variance is common to runs of 20, so intervals for independent requests cover far too seldom."""
    hits, hits_of_single = 0, 0
    length = block_length(8000)
    ones = np.ones(8000)
    for seed in range(SIMULATIONS):
        rng = np.random.default_rng((seed, 6))
        common = np.repeat(rng.normal(size=400), 20)
        times = np.exp(0.3 * (common + rng.normal(size=8000)) - 0.09)
        seen = interval([block_sums(times, length)], [block_sums(ones, length)], seed)
        hits += seen.low <= 1.0 <= seen.high
        error = float(times.std() / np.sqrt(8000))
        hits_of_single += abs(float(times.mean()) - 1.0) <= 1.96 * error
    assert hits_of_single < 0.7 * SIMULATIONS
    assert hits >= 0.88 * SIMULATIONS  # blocks of 20 lose a little at their ends


def test_a_ratio_of_paired_means_is_more_precise_than_either_mean() -> None:
    rng = np.random.default_rng(7)
    first = rng.lognormal(0.0, 1.0, 4000)
    second = 0.8 * first * rng.lognormal(0.0, 0.1, 4000)
    length = block_length(4000)
    one, other, ones = (block_sums(values, length) for values in (first, second, np.ones(4000)))
    ratio = interval([other, ones], [ones, one])
    alone = interval([other], [ones])
    assert ratio.value == pytest.approx(float(second.mean() / first.mean()))
    assert (ratio.high / ratio.low - 1) < (alone.high / alone.low - 1) / 5


def test_intervals_of_quantiles_have_their_coverage() -> None:
    hits = {0.5: 0, 0.9: 0}
    truth = {0.5: 1.0, 0.9: float(np.exp(0.8 * 1.2815516))}
    for seed in range(SIMULATIONS):
        rng = np.random.default_rng((seed, 8))
        times = rng.lognormal(0.0, 0.8, 3000)
        weights = np.where(rng.random(3000) < 0.3, 1 / 0.3, 0.0)
        for probability, true in truth.items():
            seen = weighted_quantile(times, weights, probability, block_length(3000))
            hits[probability] += seen.low <= true <= seen.high
    for count in hits.values():
        _covered(count)


def test_too_few_blocks_or_sums_of_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="19 blocks of requests are too few"):
        interval([np.ones(19)], [np.ones(19)])
    with pytest.raises(ValueError, match="must be positive"):
        interval([np.zeros(30)], [np.ones(30)])
