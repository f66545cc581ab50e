"""Steps without drafts: of the request itself, and of those beside it."""

from __future__ import annotations

import pytest

from backends.drafter_limit import Beyond, DrafterLimit
from policies.learned.undrafted import Reach, steps_of


def test_each_token_without_a_draft_is_a_step() -> None:
    assert [steps_of(200.0, undrafted, 0.0, 2.5) for undrafted in (0.0, 50.0, 200.0)] == [80.0, 110.0, 200.0]
    assert steps_of(200.0, 0.0, 1e9, 2.5) == pytest.approx(200.0)
    assert steps_of(1.5, 0.0, 0.0, 2.5) == 1.0


def test_whoever_is_there_loses_drafts_that_are_not_taken_already() -> None:
    reach = Reach(3.0, may_have_limit=True)
    reach.read(DrafterLimit(2048))
    assert reach.taken(200.0, 0.0, 8, 2.5) == pytest.approx(0.6 * 8 * 200)  # eight at a time lose 0.6 of each step
    assert reach.taken(200.0, 200.0, 8, 2.5) == pytest.approx(0.6 * 8 * 100)  # beside another one with as much left
    assert reach.taken(200.0, 0.0, 8, 1.0) == reach.taken(0.0, 0.0, 8, 2.5) == reach.taken(200.0, 0.0, 0, 2.5) == 0.0
    reach.read(DrafterLimit(2048, Beyond.NONE))
    assert reach.taken(200.0, 0.0, 8, 2.5) == 0.0
