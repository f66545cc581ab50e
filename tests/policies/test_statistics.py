"""Sums stand in the epoch of their time, and only what changed is told again."""

from __future__ import annotations

import math

import pytest

from policies import statistics
from policies.statistics import Experience, Row, Table

TABLE = Table("t", 2, half_life_s=4.0, overflow=lambda key: ("", *key[1:]))  # an epoch is a second


def _experience() -> tuple[Experience, list[float]]:
    now_s = [1000.0]
    return Experience([TABLE], lambda: now_s[0]), now_s


def test_an_observation_counts_in_its_own_epoch_whatever_the_order() -> None:
    experience, _ = _experience()
    for at_s in (1000.2, 1001.0, 1000.9, 1001.5):
        experience.add_at(at_s, TABLE, ("a", "b"), (1.0, at_s))
    rows = {row.epoch: row.sums for row in experience.own()}
    assert rows == {1000: (2.0, 1000.2 + 1000.9), 1001: (2.0, 1001.0 + 1001.5)}
    assert experience.own_of("t", 1001) == [Row("t", 1001, ("a", "b"), rows[1001])]
    assert experience.own_of("t", 7) == []
    assert experience.observations == 4


def test_each_cell_that_changed_is_told_once_and_whole() -> None:
    experience, _ = _experience()
    for key in ("a", "b", "a"):
        experience.add(TABLE, (key,), 1.0, 2.0)
    assert {row.key: row.sums for row in experience.take_changed()} == {("a",): (2.0, 4.0), ("b",): (1.0, 2.0)}
    assert experience.take_changed() == []
    experience.add(TABLE, ("a",), 1.0, 0.5)
    assert experience.take_changed() == [Row("t", 1000, ("a",), (3.0, 4.5))]


def test_old_epochs_weigh_less_and_are_dropped_with_what_changed_in_them() -> None:
    experience, now_s = _experience()
    experience.add(TABLE, ("a",), 1.0, 1.0)
    now_s[0] += TABLE.half_life_s
    assert experience.cells(TABLE) == {("a",): (0.5, 0.5)}
    now_s[0] = TABLE.end_s(1000)
    experience.add(TABLE, ("a",), 1.0, 3.0)
    assert [row.sums for row in experience.own()] == [(1.0, 3.0)]
    assert [row.sums for row in experience.take_changed()] == [(1.0, 3.0)]


def test_own_and_others_sums_add_up() -> None:
    experience, _ = _experience()
    experience.add(TABLE, ("a",), 1.0, 2.0)
    experience.set_others([Row("t", 1000, ("a",), (2.0, 3.0)), Row("t", 996, ("b",), (2.0, 4.0))])
    assert experience.cells(TABLE) == {("a",): (3.0, 5.0), ("b",): (1.0, 2.0)}


def test_a_key_too_many_counts_under_what_it_has_in_common_with_others() -> None:
    experience, _ = _experience()
    for number in range(statistics.MOST_KEYS + 5):
        experience.add(TABLE, (str(number), "x"), 1.0, 0.0)
    cells = experience.cells(TABLE)
    assert len(cells) == statistics.MOST_KEYS + 1
    assert cells["", "x"] == (5.0, 0.0)


@pytest.mark.parametrize("sums", [(1.0,), (1.0, 2.0, 3.0), (1.0, math.nan), (math.inf, 1.0), (math.inf, -math.inf)])
def test_what_would_spoil_a_cell_is_refused(sums: tuple[float, ...]) -> None:
    experience, _ = _experience()
    with pytest.raises(ValueError, match="2 finite numbers"):
        experience.add(TABLE, ("a",), *sums)
    assert list(experience.own()) == []
    experience.add(TABLE, ("a",), 1e308, 1e308)  # finite, though their sum is not
    assert len(list(experience.own())) == 1
