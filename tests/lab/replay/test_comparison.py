"""Policies side by side: ratios on common requests, and parts of the traffic."""

from __future__ import annotations

import numpy as np
import pytest

from lab.evaluate.bootstrap import Interval
from lab.replay.comparison import Traits, in_flight, parts, ratio
from lab.replay.parts import by_length
from lab.replay.simulate import Replayed
from lab.report.differences import mark, shown


def played(e2e_s: np.ndarray, number: np.ndarray | None = None, arrived_s: np.ndarray | None = None) -> Replayed:
    count = len(e2e_s)
    number = np.arange(count) if number is None else number
    return Replayed(
        e2e_s, 0.1 * e2e_s, np.full(count, np.nan), 1 + number % 100, np.zeros(count, np.int64), 0, 1.0, number,
        0.5 * number if arrived_s is None else arrived_s,
    )  # fmt: skip


def test_requests_are_compared_in_pairs() -> None:
    rng = np.random.default_rng(5)
    theirs = rng.lognormal(0, 1.5, 3000)
    mine = theirs * rng.normal(0.95, 0.05, 3000)
    found = ratio(played(mine), played(theirs), "e2e_s", seed=0)
    assert found is not None
    assert found.low < 0.95 < found.high
    assert found.high - found.low < 0.02  # the lengths, which both share, do not widen it
    assert ratio(played(mine), played(theirs), "tpot_s", seed=0) is None  # unknown for all
    assert ratio(played(mine[:50]), played(theirs[:50]), "e2e_s", seed=0) is None  # too few


def test_only_requests_that_both_served_are_compared() -> None:
    rng = np.random.default_rng(6)
    theirs = rng.lognormal(0, 1, 2000)
    kept = np.flatnonzero(np.arange(2000) % 3 > 0)
    found = ratio(played(2 * theirs[kept], kept), played(theirs), "e2e_s", seed=0)
    assert found is not None
    assert found.value == pytest.approx(2.0)
    assert found.low == pytest.approx(found.high)
    late = np.arange(2000) >= 1000
    only = ratio(played(np.where(late, 3.0, 1.0) * theirs), played(theirs), "e2e_s", 0, late)
    assert only is not None
    assert only.value == pytest.approx(3.0)


def test_parts_are_by_what_distinguishes_the_requests() -> None:
    count = 900
    prompt_tokens = np.where(np.arange(count) < 300, 100, 5000)
    traits = Traits(["code" if n % 3 else "chat" for n in range(count)], np.zeros(count), prompt_tokens)
    reference = played(np.full(800, 10.0), np.arange(100, count))  # after a warm-up
    found = {(part.by, part.name): int(part.inside.sum()) for part in parts(reference, traits)}
    assert found["workload", "code"] + found["workload", "chat"] == 800
    assert found["prompt tokens", "up to 512"] == 200
    assert found["prompt tokens", "2,049 to 8,192"] == 600
    assert ("temperature", "0") not in found  # all have it
    assert sum(size for (by, _), size in found.items() if by == "answer tokens") == 800


def test_every_length_is_in_one_range() -> None:
    tokens = np.array([0, 1, 512, 513, 32768, 32769, 10**7])
    assert sum(part.inside.astype(int) for part in by_length("prompt tokens", tokens)).tolist() == [1] * len(tokens)


def test_requests_in_flight() -> None:
    one = played(np.array([4.0, 1.0, 1.0]), arrived_s=np.array([0.0, 1.0, 3.5]))
    assert in_flight(one, np.array([-1.0, 0.0, 1.5, 2.5, 3.75, 9.0])).tolist() == [0, 1, 2, 1, 2, 0]


def test_differences_are_marked_beyond_their_interval() -> None:
    slower, faster, unsure = Interval(1.069, 1.041, 1.097), Interval(0.9, 0.85, 0.99), Interval(1.01, 0.99, 1.03)
    assert [shown(one)[0] for one in (slower, faster, unsure)] == ["▲", "▼", "+"]
    assert shown(slower) == "▲ +6.9 (+4.1 to +9.7)"
    assert [mark(one) for one in (slower, faster, unsure, None)] == ["bad", "good", "", "few"]
    assert mark(slower, less_is_better=False) == "good"
