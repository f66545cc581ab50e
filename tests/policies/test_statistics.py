"""Sums belong to the epoch of their time, and only changed buckets are returned again."""

from __future__ import annotations

import math

import pytest

from policies import statistics as statistics_module
from policies.statistics import Row, Statistics, Table

TABLE = Table("t", 2, half_life_s=4.0, overflow=lambda key: ("", *key[1:]))  # an epoch is a second


def _statistics() -> tuple[Statistics, list[float]]:
    now_s = [1000.0]
    return Statistics([TABLE], lambda: now_s[0]), now_s


def test_observations_count_in_their_own_epoch_in_any_order() -> None:
    statistics, _ = _statistics()
    for at_s in (1000.2, 1001.0, 1000.9, 1001.5):
        statistics.add_at(at_s, TABLE, ("a", "b"), (1.0, at_s))
    rows = {row.epoch: row.sums for row in statistics.own()}
    assert rows == {1000: (2.0, 1000.2 + 1000.9), 1001: (2.0, 1001.0 + 1001.5)}
    assert statistics.own_of("t", 1001) == [Row("t", 1001, ("a", "b"), rows[1001])]
    assert statistics.own_of("t", 7) == []
    assert statistics.observations == 4


def test_a_changed_epoch_is_returned_once() -> None:
    statistics, _ = _statistics()
    for key in ("a", "b", "a"):
        statistics.add(TABLE, (key,), 1.0, 2.0)
    assert statistics.take_changed() == [("t", 1000)]
    assert statistics.take_changed() == []
    statistics.add(TABLE, ("a",), 1.0, 0.5)
    statistics.add_at(1001.0, TABLE, ("a",), (1.0, 0.5))
    assert statistics.take_changed() == [("t", 1000), ("t", 1001)]
    statistics.add_at(1001.0, TABLE, ("a",), (1.0, 0.5))
    assert statistics.take_changed() == [("t", 1001)]


def test_old_epochs_are_discounted_and_dropped_with_their_changes() -> None:
    statistics, now_s = _statistics()
    statistics.add(TABLE, ("a",), 1.0, 1.0)
    now_s[0] += TABLE.half_life_s
    assert statistics.buckets(TABLE) == {("a",): (0.5, 0.5)}
    now_s[0] = TABLE.end_s(1000)
    statistics.add(TABLE, ("a",), 1.0, 3.0)
    assert [row.sums for row in statistics.own()] == [(1.0, 3.0)]
    assert statistics.take_changed() == [("t", int(TABLE.end_s(1000)))]


def test_own_and_received_sums_add_up() -> None:
    statistics, _ = _statistics()
    statistics.add(TABLE, ("a",), 1.0, 2.0)
    statistics.set_others_of("t", 1000, {("a",): (2.0, 3.0)})
    statistics.set_others_of("t", 996, {("b",): (2.0, 4.0)})
    assert statistics.buckets(TABLE) == {("a",): (3.0, 5.0), ("b",): (1.0, 2.0)}


def test_keys_above_the_limit_are_merged() -> None:
    statistics, _ = _statistics()
    for number in range(statistics_module.MAX_KEYS + 5):
        statistics.add(TABLE, (str(number), "x"), 1.0, 0.0)
    buckets = statistics.buckets(TABLE)
    assert len(buckets) == statistics_module.MAX_KEYS + 1
    assert buckets["", "x"] == (5.0, 0.0)


@pytest.mark.parametrize("sums", [(1.0,), (1.0, 2.0, 3.0), (1.0, math.nan), (math.inf, 1.0), (math.inf, -math.inf)])
def test_invalid_sums_are_rejected(sums: tuple[float, ...]) -> None:
    statistics, _ = _statistics()
    with pytest.raises(ValueError, match="2 finite numbers"):
        statistics.add(TABLE, ("a",), *sums)
    assert list(statistics.own()) == []
    statistics.add(TABLE, ("a",), 1e308, 1e308)  # finite, though their sum is not
    assert len(list(statistics.own())) == 1


def test_dropped_buckets_are_gone_from_all_epochs_and_count_as_changed() -> None:
    other = Table("u", 1, half_life_s=4.0, overflow=lambda key: key)
    statistics = Statistics([TABLE, other], lambda: 1001.0)
    for at_s in (1000.0, 1001.0):
        for key in ("a", "b"):
            statistics.add_at(at_s, TABLE, (key,), (1.0, 2.0))
    statistics.add(other, ("a",), 1.0)
    statistics.set_others_of("t", 1001, {("a",): (3.0, 6.0)})
    statistics.take_changed()
    before = statistics.observations
    statistics.drop(TABLE, lambda key: key[0] == "a")
    assert {row.key for row in statistics.own() if row.table == "t"} == {("b",)}
    assert statistics.buckets(TABLE)["a",] == (3.0, 6.0)  # of others, who drop theirs
    assert statistics.buckets(other) == {("a",): (1.0,)}
    assert statistics.take_changed() == [("t", 1000), ("t", 1001)]
    assert statistics.observations > before


def test_what_is_forgotten_is_gone_and_ignored_of_others_up_to_now() -> None:
    statistics, now_s = _statistics()
    statistics.add(TABLE, ("a",), 1.0, 2.0)
    statistics.set_others_of("t", 1000, {("a",): (1.0, 1.0), ("b",): (1.0, 1.0)})
    statistics.forget(TABLE, "a")
    assert statistics.buckets(TABLE).keys() == {("b",)}
    statistics.set_others_of("t", 1000, {("a",): (2.0, 2.0)})  # told again, as by a process that has ended
    statistics.set_others_of("t", 1001, {("a",): (1.0, 3.0)})
    now_s[0] += 1.0
    assert statistics.buckets(TABLE) == {("a",): (1.0, 3.0)}
    statistics.add(TABLE, ("a",), 1.0, 2.0)
    assert statistics.buckets(TABLE) == {("a",): (2.0, 5.0)}
    now_s[0] += TABLE.half_life_s * 7
    statistics.add(TABLE, ("a",), 1.0, 2.0)
    assert not statistics._ignored
