import pytest

from backends.backend import Backend
from backends.calibration.load import load_calibration
from backends.draft_schedule import DraftSchedule, draft_schedule, k_by_batch
from backends.simulator.engine.replica import SimulatedReplica
from backends.speculation import Method

RANGES = [[1, 2, 3], [5, 6, 1]]
CONFIG = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": RANGES}


def test_k_by_batch_size_follows_vllm() -> None:
    schedule = draft_schedule(Method.EAGLE3, CONFIG)
    assert schedule == DraftSchedule(4, (4, 3, 3, 3, 3, 1, 1))
    assert [schedule.at(batch) for batch in (1, 4, 5, 6, 7, 1000)] == [3, 3, 1, 1, 1, 1]
    assert k_by_batch([[3, 3, 9], [1, 2, 2]], 4) == (4, 2, 2, 4)


@pytest.mark.parametrize("wrong", [[[2, 4, 1]], [[1, 4, 1], [4, 5, 1]], [[1, 0, 1]], [[1, 2, -1]], [[1, 2]]])
def test_invalid_schedules_are_refused(wrong: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="batch-size schedule"):
        k_by_batch(wrong, 4)


def test_a_schedule_is_empty_where_k_is_fixed() -> None:
    assert draft_schedule(Method.SUFFIX, {}) == DraftSchedule(24)
    assert draft_schedule(Method.BASELINE, None).at(7) == 0
    assert draft_schedule(Method.DSPARK, {"num_speculative_tokens": 7, "enable_adaptive_verification": True}).adaptive
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        draft_schedule(Method.EAGLE3, {})


def test_candidates_have_the_schedule_of_their_config() -> None:
    expected = draft_schedule(Method.EAGLE3, CONFIG)
    backend = Backend("a", "m", Method.EAGLE3, "http://x", num_speculative_tokens=4, speculative_config=CONFIG)
    replica = SimulatedReplica("a", load_calibration("llama-3.1-8b-h100"), Method.EAGLE3, CONFIG)
    assert backend.draft_schedule == replica.draft_schedule == expected
    assert Backend("a", "m", Method.EAGLE3, "http://x").draft_schedule == DraftSchedule(3)
