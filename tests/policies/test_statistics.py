"""Sums stand in the epoch of their time, and only what changed is told again."""

from __future__ import annotations

import math

import pytest

from policies import statistics as statistics_module
from policies.statistics import Row, Statistics, Table

TABLE = Table("t", 2, half_life_s=4.0, overflow=lambda key: ("", *key[1:]))  # an epoch is a second


def _experience() -> tuple[Statistics, list[float]]:
    now_s = [1000.0]
    return Statistics([TABLE], lambda: now_s[0]), now_s


def test_an_observation_counts_in_its_own_epoch_whatever_the_order() -> None:
    statistics, _ = _experience()
    for at_s in (1000.2, 1001.0, 1000.9, 1001.5):
        statistics.add_at(at_s, TABLE, ("a", "b"), (1.0, at_s))
    rows = {row.epoch: row.sums for row in statistics.own()}
    assert rows == {1000: (2.0, 1000.2 + 1000.9), 1001: (2.0, 1001.0 + 1001.5)}
    assert statistics.own_of("t", 1001) == [Row("t", 1001, ("a", "b"), rows[1001])]
    assert statistics.own_of("t", 7) == []
    assert statistics.observations == 4


def test_each_cell_that_changed_is_told_once_and_whole() -> None:
    statistics, _ = _experience()
    for key in ("a", "b", "a"):
        statistics.add(TABLE, (key,), 1.0, 2.0)
    assert {row.key: row.sums for row in statistics.take_changed()} == {("a",): (2.0, 4.0), ("b",): (1.0, 2.0)}
    assert statistics.take_changed() == []
    statistics.add(TABLE, ("a",), 1.0, 0.5)
    assert statistics.take_changed() == [Row("t", 1000, ("a",), (3.0, 4.5))]


def test_old_epochs_weigh_less_and_are_dropped_with_what_changed_in_them() -> None:
    statistics, now_s = _experience()
    statistics.add(TABLE, ("a",), 1.0, 1.0)
    now_s[0] += TABLE.half_life_s
    assert statistics.buckets(TABLE) == {("a",): (0.5, 0.5)}
    now_s[0] = TABLE.end_s(1000)
    statistics.add(TABLE, ("a",), 1.0, 3.0)
    assert [row.sums for row in statistics.own()] == [(1.0, 3.0)]
    assert [row.sums for row in statistics.take_changed()] == [(1.0, 3.0)]


def test_own_and_others_sums_add_up() -> None:
    statistics, _ = _experience()
    statistics.add(TABLE, ("a",), 1.0, 2.0)
    statistics.set_others([Row("t", 1000, ("a",), (2.0, 3.0)), Row("t", 996, ("b",), (2.0, 4.0))])
    assert statistics.buckets(TABLE) == {("a",): (3.0, 5.0), ("b",): (1.0, 2.0)}


def test_a_key_too_many_counts_under_what_it_has_in_common_with_others() -> None:
    statistics, _ = _experience()
    for number in range(statistics_module.MOST_KEYS + 5):
        statistics.add(TABLE, (str(number), "x"), 1.0, 0.0)
    buckets = statistics.buckets(TABLE)
    assert len(buckets) == statistics_module.MOST_KEYS + 1
    assert buckets["", "x"] == (5.0, 0.0)


@pytest.mark.parametrize("sums", [(1.0,), (1.0, 2.0, 3.0), (1.0, math.nan), (math.inf, 1.0), (math.inf, -math.inf)])
def test_what_would_spoil_a_cell_is_refused(sums: tuple[float, ...]) -> None:
    statistics, _ = _experience()
    with pytest.raises(ValueError, match="2 finite numbers"):
        statistics.add(TABLE, ("a",), *sums)
    assert list(statistics.own()) == []
    statistics.add(TABLE, ("a",), 1e308, 1e308)  # finite, though their sum is not
    assert len(list(statistics.own())) == 1
