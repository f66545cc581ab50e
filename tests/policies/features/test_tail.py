from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.features.tail import WINDOW_BYTES, overlap_of_ids, overlap_of_text


def counted(units: Sequence[object], length: int) -> float:
    """Return the share of runs that occur earlier, straight from the definition."""
    runs = [tuple(units[start : start + length]) for start in range(len(units) - length + 1)]
    return sum(run in runs[:index] for index, run in enumerate(runs)) / len(runs) if runs else 0.0


@given(
    st.lists(st.sampled_from(["a", "bc", "def ghij klmnop qrst", "\u6f22\u5b57", "\ud800"]), max_size=30).map("".join)
)
def test_overlap_of_text_is_the_share_of_repeated_16_byte_runs(text: str) -> None:
    assert abs(overlap_of_text(text) - counted(text.encode("utf-8", "surrogatepass"), 16)) < 1e-12


@pytest.mark.slow
@given(st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=40))
def test_overlap_of_ids_is_the_share_of_repeated_3_grams(ids: list[int]) -> None:
    assert abs(overlap_of_ids(ids) - counted(ids, 3)) < 1e-12


def test_only_the_window_counts() -> None:
    fresh = "".join(f"{number:04d}" for number in range(WINDOW_BYTES // 4))
    assert overlap_of_text("a" * 5000 + fresh) == overlap_of_text(fresh) < 0.01
    assert overlap_of_text(fresh + "a" * 5000) == 1.0 - 1 / (WINDOW_BYTES - 15)
    assert overlap_of_text("\u6f22" + fresh[:-1]) == overlap_of_text(fresh[:-1])
    assert overlap_of_ids([7] * 1000 + list(range(256))) == 0.0


def test_invalid_ids_have_no_overlap() -> None:
    for invalid in ([1, 2, 3, "x"] * 9, [1.0] * 9, [-1] * 9, [2**32] * 9, [None] * 9):
        assert overlap_of_ids(invalid) == 0.0  # type: ignore[arg-type]
