"""Who won, and when nobody did."""

from __future__ import annotations

import math
from itertools import permutations

from lab.replay.comparison import winner
from lab.statistics import Interval

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
