"""Steps without drafts: of the request itself, and of those beside it."""

from __future__ import annotations

import pytest

from policies.learned.models.undrafted import steps_of, steps_taken


def test_each_token_without_a_draft_is_a_step() -> None:
    assert [steps_of(200.0, undrafted, 0.0, 2.5) for undrafted in (0.0, 50.0, 200.0)] == [80.0, 110.0, 200.0]
    assert steps_of(200.0, 0.0, 1e9, 2.5) == pytest.approx(200.0)
    assert steps_of(1.5, 0.0, 0.0, 2.5) == 1.0


def test_whoever_is_there_loses_drafts_that_are_not_taken_already() -> None:
    # Eight at a time lose 0.6 of each step, whether they stay or are followed by others.
    assert steps_taken(200.0, 0.0, 8, 250.0, 8.0, 2.5) == pytest.approx(0.6 * 8 * 200)
    again = steps_taken(200.0, 200.0, 8, 250.0, 8.0, 2.5)  # beside another one that has as much left
    assert again == pytest.approx(0.5 * steps_taken(200.0, 0.0, 8, 250.0, 8.0, 2.5))
    assert steps_taken(200.0, 0.0, 8, 250.0, 8.0, 1.0) == steps_taken(0.0, 0.0, 8, 250.0, 8.0, 2.5) == 0.0
