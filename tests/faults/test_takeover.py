"""A gateway that takes over from another under streams, without a refused connection and without a lost stream."""

from __future__ import annotations

import pytest

from benchmarks.faults.takeover import takeover

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


@pytest.mark.parametrize(("passes", "workers"), [(False, 1), (False, 2), (True, 2)])
async def test_a_takeover_refuses_no_connection_and_loses_no_stream(passes: bool, workers: int) -> None:
    found = await takeover(1, 25.0, passes=passes, workers=workers)
    assert (found.refused, found.lost) == (0, 0), found.examples
    assert found.handed_over > 0
