"""Expected steps without drafts, against random numbers."""

from __future__ import annotations

import numpy as np
import pytest

from policies.learned.models.undrafted import Undrafted, longest


def test_the_longest_of_some_is_that_of_exponential_ones() -> None:
    drawn = np.random.default_rng(1).exponential(100.0, (100_000, 4)).max(axis=1).mean()
    assert longest(400.0, 4) == pytest.approx(drawn, rel=0.2)
    assert (longest(30.0, 1), longest(0.0, 0)) == (30.0, 0.0)


def test_steps_and_what_is_taken_from_others() -> None:
    within, beyond = Undrafted(0.0, 0.0, 0.0, True), Undrafted(0.0, 200.0, 0.0, True)
    assert (within.steps(200.0, 2.5), beyond.steps(200.0, 2.5)) == (80.0, 200.0)
    assert within.taken(8, 100.0, 8.0, 2.5) == 0.0
    assert Undrafted(0.0, 200.0, 0.0, False).taken(8, 100.0, 8.0, 2.5) == 0.0
    # Whoever is there loses 0.6 of each step: eight at a time, whether they stay or are followed by others.
    assert beyond.taken(8, 100.0, 8.0, 2.5) == pytest.approx(0.6 * 8 * 200)
    again = Undrafted(0.0, 200.0, 200.0, True)  # beside another one that has as much left
    assert again.taken(8, 100.0, 8.0, 2.5) == pytest.approx(0.5 * beyond.taken(8, 100.0, 8.0, 2.5))
    beside = Undrafted(0.0, 0.0, 1e9, True)
    assert beside.steps(200.0, 2.5) == pytest.approx(200.0)
