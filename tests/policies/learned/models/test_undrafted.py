"""Expected steps without drafts, against random numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.learned.models.undrafted import Undrafted, longest, undrafted


@pytest.mark.parametrize(("room", "tokens", "spread"), [(200.0, 220.0, 0.7), (1500.0, 220.0, 0.7), (50.0, 400.0, 1.0)])
def test_the_tokens_beyond_are_those_of_a_log_normal_answer(room: float, tokens: float, spread: float) -> None:
    answers = np.random.default_rng(1).lognormal(math.log(tokens) - spread**2 / 2, spread, 1_000_000)
    probability, beyond = undrafted(room, tokens, spread)
    assert probability == pytest.approx((answers > room).mean(), rel=0.03)
    assert beyond == pytest.approx(np.maximum(0.0, answers - room).mean(), rel=0.05)
    assert undrafted(0.0, tokens, spread) == (1.0, tokens)


def test_the_longest_of_some_is_that_of_exponential_ones() -> None:
    drawn = np.random.default_rng(1).exponential(100.0, (100_000, 4)).max(axis=1).mean()
    assert longest(400.0, 4.0) == pytest.approx(drawn, rel=0.2)
    assert longest(30.0, 0.3) == 30.0


def test_steps_and_what_is_taken_from_others() -> None:
    within, beyond = Undrafted(0.0, 0.0, 0.0, 0.0, True), Undrafted(1.0, 200.0, 0.0, 0.0, True)
    assert (within.steps(200.0, 2.5), beyond.steps(200.0, 2.5)) == (80.0, 200.0)
    assert within.taken(8, 100.0, 8.0, 2.5) == 0.0
    assert Undrafted(1.0, 200.0, 0.0, 0.0, False).taken(8, 100.0, 8.0, 2.5) == 0.0
    # Whoever is there loses 0.6 of each step: eight at a time, whether they stay or are followed by others.
    assert beyond.taken(8, 100.0, 8.0, 2.5) == pytest.approx(0.6 * 8 * 200)
    again = Undrafted(1.0, 200.0, 200.0, 0.0, True)  # beside another one that has as much left
    assert again.taken(8, 100.0, 8.0, 2.5) == pytest.approx(0.5 * beyond.taken(8, 100.0, 8.0, 2.5))
    beside = Undrafted(0.0, 0.0, 1e9, 0.0, True)
    assert beside.steps(200.0, 2.5) == pytest.approx(200.0)
