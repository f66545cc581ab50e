"""Windows of traffic, and the same windows with other shares of a group."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

import pytest

from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from backends.validation import UsageError
from lab.plan.mixes import kinds, machine_of
from lab.plan.runner import reshared
from lab.plan.schedules import with_schedules
from lab.plan.traffic import WINDOWS, evenly, group_of, sample
from lab.replay.request import ReplayRequest, replay_request
from lab.trace import TraceRecord


def _record(number: int, **told: object) -> TraceRecord:
    known: dict[str, object] = {"workload": ("chat", "code", "chat", "math")[number % 4], "temperature": 0.0}
    known |= {"arrived_at": 1000.0 + 0.1 * number, "prompt_tokens": 100, "output_tokens": 50}
    return TraceRecord(id=str(number), **(known | told))  # type: ignore[arg-type]


def _requests(count: int) -> list[ReplayRequest]:
    return [replay_request(_record(number), 0.1 * number, 0.0) for number in range(count)]


@pytest.mark.parametrize("count", [9_500, 9_501, 40_000, 123_457, 300_000])
def test_windows_are_spread_evenly_over_traces_of_any_length(count: int) -> None:
    windows, counted = evenly(range(count), 500)
    assert counted == count
    assert len(windows) == WINDOWS
    assert all(window == list(range(window[0], window[0] + len(window))) for window in windows)
    starts = [window[0] for window in windows]
    assert starts[0] == 0
    assert starts[-1] > count - 2 * count / WINDOWS
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert max(gaps) <= 2 * min(gaps)


def test_few_requests_are_cut_into_windows_of_equal_size() -> None:
    windows, _ = evenly(range(800), 500)
    assert list(chain.from_iterable(windows)) == list(range(800))
    assert [len(window) for window in windows] == [114, 114, 114, 115, 114, 114, 115]
    with pytest.raises(ValueError, match="5 requests are too few"):
        evenly(range(5), 500)


def test_a_sample_keeps_the_times_within_windows_on_one_clock() -> None:
    traffic = sample((_record(number) for number in range(50_000)), 4, 131_072, 1.0, speed=2.0)
    assert traffic.requests == 50_000
    assert str(traffic) == "9,500 requests in 19 windows, spread evenly over 50,000"
    times = [request.arrived_s for window in traffic.windows for request in window]
    assert times == sorted(times)
    first = traffic.windows[3]
    assert first[1].arrived_s - first[0].arrived_s == pytest.approx(0.05)
    scaled = sample((_record(number) for number in range(50_000)), 4, 131_072, 1.0, rate=40.0)
    assert scaled.windows[3][1].arrived_s - scaled.windows[3][0].arrived_s == pytest.approx(1 / 40, rel=0.01)


def test_what_the_target_cannot_serve_is_left_out_and_counted() -> None:
    records = [_record(number, **({"endpoint": "other"} if number % 10 == 0 else {})) for number in range(100)]
    traffic = sample([*records, _record(100, output_tokens=9000)], 4, 8192, 1.0, limit=28)
    assert (traffic.requests, traffic.left_out) == (90, 11)
    assert sum(map(len, traffic.windows)) == 28
    with pytest.raises(UsageError, match="no arrival times; give --rate"):
        sample([_record(number, arrived_at=None) for number in range(60)], 4, 8192, 1.0)
    placed = sample([_record(number, arrived_at=None) for number in range(60)], 4, 8192, 1.0, rate=5.0)
    assert placed.windows[-1][-1].arrived_s - placed.windows[0][0].arrived_s > 5


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0])
def test_a_window_gets_another_share_of_a_group_at_the_same_times(share: float) -> None:
    windows = sample(map(_record, range(1600)), 4, 131_072, 0.0).windows
    changed = reshared(windows, 1, "chat", share)
    assert [one.arrived_s for one in changed] == [one.arrived_s for one in windows[1]]
    counts = Counter(group_of(one.features) for one in changed)
    assert counts["chat"] == round(share * len(changed))
    if share < 1.0:
        assert counts["code"] > 0
        assert counts["math"] > 0
    assert changed == reshared(windows, 1, "chat", share)


def test_methods_that_draft_with_a_model_are_also_tried_with_k_by_batch_size() -> None:
    calibration = load_calibration("llama-3.1-8b-h100")
    methods = [(Method.BASELINE, (0,)), (Method.NGRAM, (3, 5)), (Method.SUFFIX, (24,)), (Method.EAGLE3, (2, 5))]
    known = kinds(calibration, machine_of(calibration), 8192, methods)
    made = with_schedules(known, calibration, _requests(40))
    assert made[: len(known)] == known
    (scheduled,) = made[len(known) :]
    assert scheduled.method is Method.EAGLE3
    assert scheduled.title == f"eagle3 k<={scheduled.k}"
    ranges = scheduled.config["num_speculative_tokens_per_batch_size"]
    assert scheduled.config["num_speculative_tokens"] == max(k for *_, k in ranges) <= 5
    assert ranges[0][0] == 1
    assert all(later[0] == earlier[1] + 1 and later[2] < earlier[2] for earlier, later in pairwise(ranges))
