"""Tasks on all cores."""

from __future__ import annotations

import pytest

from lab.parallel import all_cores, report_progress


def _square(number: int) -> int:
    report_progress(number)
    return number * number


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_all_cores_returns_results_in_order_and_reports_progress(jobs: int) -> None:
    reported: list[int] = []
    with all_cores(_square, jobs, reported.append) as run_all:
        assert run_all(range(20)) == [number * number for number in range(20)]
        assert sum(reported) == sum(range(20))
        assert run_all([7]) == [49]
    assert sum(reported) == sum(range(20)) + 7
