"""Blocks of time, and the pace of kinds of requests."""

from __future__ import annotations

from policies.experiment.blocks import Blocks, Paces


def test_a_client_s_kinds_are_bounded() -> None:
    paces = Paces()
    for number in range(1000):
        paces.of(f"kind {number}", 1.0, 100.0)
    assert len(paces._kinds) <= 65


def test_a_request_counts_in_each_block_by_the_time_that_it_spent_there() -> None:
    blocks = Blocks(40.0)
    assert blocks.begin(10, 401.0)
    assert blocks.begin(11, 440.0)
    assert not blocks.begin(12, 495.0), "its beginning was not seen"
    blocks.observe(455.0, 35.0, 100.0, "", 0)  # from 420 to 455, of which 420 to 435 and 450 to 455 count
    found = dict(blocks.closed(600.0))
    assert [found[10][0].seconds, found[11][0].seconds] == [15.0, 5.0]
    assert found[10][0].arrived_work > 0.0 == found[11][0].arrived_work
    assert not dict(blocks.closed(600.0))
