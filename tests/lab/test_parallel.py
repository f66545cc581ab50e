"""Tasks on all cores."""

from __future__ import annotations

import pytest

from lab.parallel import all_cores


def _square(number: int) -> int:
    return number * number


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_all_cores_returns_results_in_order(jobs: int) -> None:
    with all_cores(_square, jobs, "squaring") as run_all:
        assert run_all(range(20)) == [number * number for number in range(20)]
        assert run_all([7]) == [49]
