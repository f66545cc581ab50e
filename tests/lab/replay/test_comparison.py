"""Policies side by side: ratios on common requests, parts of the traffic, and who won."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest

from lab.replay.comparison import in_flight, intervals, parts, ratio, ratios, winner
from lab.replay.page import mark, shown
from lab.simulation.simulate import Replayed
from lab.simulation.table import Traits
from lab.statistics import Interval


def played(e2e_s: np.ndarray, number: np.ndarray | None = None, arrived_s: np.ndarray | None = None) -> Replayed:
    count = len(e2e_s)
    number = np.arange(count) if number is None else number
    return Replayed(
        e2e_s, 0.1 * e2e_s, np.full(count, np.nan), 1 + number % 100, np.zeros(count, np.int64), 0, 1.0, number,
        np.asarray(0.5 * number if arrived_s is None else arrived_s, np.float64),
    )  # fmt: skip


def test_only_requests_that_both_served_are_compared() -> None:
    rng = np.random.default_rng(6)
    theirs = rng.lognormal(0, 1, 2000)
    kept = np.flatnonzero(np.arange(2000) % 3 > 0)
    assert ratio(played(2 * theirs[kept], kept), played(theirs), "e2e_s") == pytest.approx(2.0)
    assert ratio(played(theirs), played(theirs), "tpot_s") is None  # unknown for all
    late = np.arange(2000) >= 1000
    only = ratio(played(np.where(late, 3.0, 1.0) * theirs), played(theirs), "e2e_s", late)
    assert only == pytest.approx(3.0)


def test_parts_of_other_traffic_are_found_again() -> None:
    """Thirds by load have other bounds in other traffic."""
    theirs, load_s = np.full(900, 10.0), np.cumsum(np.r_[np.full(300, 9.0), np.full(300, 3.0), np.full(300, 1.0)])
    traits = Traits(["chat"] * 900, np.zeros(900), np.full(900, 100))
    one, other = (
        ratios({"a": played(2 * theirs, arrived_s=at_s), "b": played(theirs, arrived_s=at_s)}, "b", traits)
        for at_s in (load_s, load_s / 2)
    )
    assert ("in flight on arrival", "2", "a") in one
    assert one.keys() == other.keys()
    found = intervals(one, [other, other])
    assert found["e2e_s", "a"] == Interval(2.0, 2.0, 2.0)
    assert found["in flight on arrival", "0", "a"].is_known
    assert intervals(one, [])["e2e_s", "a"] == Interval(2.0)


def test_parts_are_by_what_distinguishes_the_requests() -> None:
    count = 900
    prompt_tokens = np.where(np.arange(count) < 300, 100, 5000)
    traits = Traits(["code" if n % 3 else "chat" for n in range(count)], np.zeros(count), prompt_tokens)
    reference = played(np.full(800, 10.0), np.arange(100, count))  # after a warm-up
    found = {(part.by, part.name): int(part.inside.sum()) for part in parts(reference, traits)}
    assert found["workload", "code"] + found["workload", "chat"] == 800
    assert found["prompt tokens", "up to 512"] == 200
    assert found["prompt tokens", "above 2,048 to 8,192"] == 600
    assert ("temperature", "0") not in found  # all have it
    assert sum(size for (by, _), size in found.items() if by == "answer tokens") == 800  # each is in one range


def test_requests_in_flight() -> None:
    one = played(np.array([4.0, 1.0, 1.0]), arrived_s=np.array([0.0, 1.0, 3.5]))
    assert in_flight(one, np.array([-1.0, 0.0, 1.5, 2.5, 3.75, 9.0])).tolist() == [0, 1, 2, 1, 2, 0]


def test_differences_are_marked_beyond_their_interval() -> None:
    slower, faster, unsure = Interval(1.069, 1.041, 1.097), Interval(0.9, 0.85, 0.99), Interval(1.01, 0.99, 1.03)
    assert [shown(one)[0] for one in (slower, faster, unsure)] == ["▲", "▼", "+"]
    assert shown(slower) == "▲ +6.9 (+4.1 to +9.7)"
    assert [mark(one) for one in (slower, faster, unsure, None, Interval(2.0))] == ["bad", "good", "", "few", "few"]
    assert shown(Interval(2.0)) == "+100.0"


MEAN_S = {"a": 2.0, "b": 1.0, "c": 1.5}
CLEAR = {pair: Interval(MEAN_S[pair[0]] / MEAN_S[pair[1]], 0.5, 0.9) for pair in permutations(MEAN_S, 2)}


def test_the_fastest_wins_if_it_beats_each_other() -> None:
    assert winner(MEAN_S, CLEAR, {}) == (
        "b won: its mean time to finish is 33.3% (95%: 10.0% to 50.0%) shorter than that of c, the next."
    )
    chance = CLEAR | {("b", "a"): Interval(0.5, 0.2, 1.0)}
    assert winner(MEAN_S, chance, {}).startswith("Nobody won: the mean time to finish of b is 50.0% (95%: 0.0% to")


def test_a_tie_a_ratio_without_interval_and_one_alone_have_no_winner() -> None:
    pair = {"a": 1.0, "b": 1.0}
    tie = winner(pair, {("a", "b"): Interval(1.0, 1.0, 1.0)}, {})
    assert tie == "Nobody won: a and b take the same time to finish."
    assert winner(pair, {("a", "b"): Interval(0.9)}, {}).startswith(
        "Nobody is shown to win: a finishes before b: 10.0%"
    )
    assert winner(pair, {}, {}).startswith("Nobody is shown to win")
    assert winner({"a": 1.0}, {}, {}) == "a is alone: nobody to compare."


def test_who_failed_requests_cannot_win() -> None:
    failed = {"b": "failed 3 of 20 requests"}
    said = winner(MEAN_S, CLEAR, failed)
    assert said.startswith("c won")
    assert said.endswith("that of a. b failed 3 of 20 requests and cannot win.")
    assert winner({"a": 1.0, "b": math.nan}, {}, failed).startswith("a won: it alone failed no request. b failed")
    assert winner({"b": 1.0}, {}, failed) == "Nobody won. b failed 3 of 20 requests and cannot win."
