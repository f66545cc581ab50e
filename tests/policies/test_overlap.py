from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.overlap import repeated_share


def counted(units: list[int]) -> float:
    """Count as the definition says: 3-grams that occur earlier, over all."""
    grams = [tuple(units[place : place + 3]) for place in range(len(units) - 2)]
    return sum(gram in grams[:place] for place, gram in enumerate(grams)) / len(grams) if grams else 0.0


@given(st.lists(st.integers(0, 3), max_size=40))
def test_it_is_the_share_of_3_grams_that_occur_earlier(units: list[int]) -> None:
    assert abs(repeated_share(units) - counted(units)) < 1e-12


def test_only_the_window_counts() -> None:
    assert repeated_share(["a"] * 100 + list("bcdefgh"), window=7) == 0.0
    assert repeated_share(list("bcdefgh") + ["a"] * 102, window=102) == 0.99
