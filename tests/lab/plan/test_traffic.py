"""Windows of traffic, and kinds whose k follows the batch size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from backends.calibration.load import load_calibration
from backends.speculation import Method
from backends.validation import UsageError
from lab.plan.mixes import kinds, with_schedules
from lab.plan.traffic import WINDOWS, TrafficSample, evenly, one_after_another, sample
from lab.simulation.request import ReplayRequest, replay_request
from lab.simulation.table import request_table
from lab.trace.record import TraceRecord


def _record(number: int, **told: object) -> TraceRecord:
    known: dict[str, object] = {"workload": ("chat", "code", "chat", "math")[number % 4], "temperature": 0.0}
    known |= {"arrived_at": 1000.0 + 0.1 * number, "prompt_tokens": 100, "output_tokens": 50}
    return TraceRecord(id=str(number), **(known | told))  # type: ignore[arg-type]


def sampled(
    records: list[TraceRecord], max_model_len: int = 131_072, *, limit: int | None = None, rate: float | None = None,
    speed: float = 1.0,
) -> TrafficSample:  # fmt: skip
    with request_table(records, 1.0) as table:
        return sample(table, 4, max_model_len, limit=limit, rate=rate, speed=speed)


def _requests(count: int) -> list[ReplayRequest]:
    return [replay_request(_record(number), 0.1 * number, 0.0) for number in range(count)]


@pytest.mark.parametrize("count", [14, 800, 9_499, 9_500, 40_000, 300_000])
def test_windows_are_spread_evenly_over_traces_of_any_length(count: int) -> None:
    windows = [range(count)[part] for part in evenly(count, 500)]
    assert (windows[0].start, windows[-1].stop) == (0, count)
    gaps = [later.start - earlier.start for earlier, later in pairwise(windows)]
    assert max(gaps) <= min(gaps) + 1
    if count < 500 * WINDOWS:  # all of them
        assert all(later.start == earlier.stop for earlier, later in pairwise(windows))
    else:
        assert {len(window) for window in windows} == {500}
        assert len(windows) == WINDOWS


@pytest.mark.slow
def test_a_sample_keeps_the_times_within_windows() -> None:
    traffic = sampled([_record(number) for number in range(50_000)], speed=2.0)
    assert traffic.requests == 50_000
    assert str(traffic) == " ".join(["9,500 requests in 19 windows, spread evenly over 50,000.", *traffic.assumed])
    times = [request.arrived_s for request in one_after_another(traffic.windows)]
    assert times == pytest.approx([0.05 * number for number in range(9_500)])
    first = traffic.windows[3]
    assert first[1].arrived_s - first[0].arrived_s == pytest.approx(0.05)
    scaled = sampled([_record(number) for number in range(50_000)], rate=40.0)
    assert scaled.windows[3][1].arrived_s - scaled.windows[3][0].arrived_s == pytest.approx(1 / 40, rel=0.01)


def test_what_the_target_cannot_serve_is_left_out_and_counted() -> None:
    records = [_record(number, **({"endpoint": "other"} if number % 10 == 0 else {})) for number in range(100)]
    traffic = sampled([*records, _record(100, output_tokens=9000)], 8192, limit=28)
    assert (traffic.requests, traffic.left_out) == (90, 1)
    assert sum(map(len, traffic.windows)) == 28
    with pytest.raises(ValueError, match="5 requests are too few"):
        sampled([_record(number) for number in range(5)])
    with pytest.raises(UsageError, match="no arrival times; give --rate"):
        sampled([_record(number, arrived_at=None) for number in range(60)])
    placed = sampled([_record(number, arrived_at=None) for number in range(60)], rate=5.0)
    assert one_after_another(placed.windows)[-1].arrived_s > 5


def test_a_session_ends_with_its_window() -> None:
    window = [replace(one, session="a", think_s=1.0) for one in _requests(2)]
    assert [one.session for one in one_after_another([window, window])] == ["a/0", "a/0", "a/1", "a/1"]


def test_methods_that_draft_with_a_model_are_also_tried_with_k_by_batch_size() -> None:
    calibration = load_calibration("llama-3.1-8b-h100")
    methods = [(Method.BASELINE, (0,)), (Method.NGRAM, (3, 5)), (Method.SUFFIX, (24,)), (Method.EAGLE3, (2, 5))]
    known = kinds(calibration, 8192, methods)
    made = with_schedules(known, calibration, _requests(40))
    assert made[: len(known)] == known
    (scheduled,) = made[len(known) :]
    assert scheduled.method is Method.EAGLE3
    assert scheduled.title == f"eagle3 k<={scheduled.k}"
    ranges = scheduled.config["num_speculative_tokens_per_batch_size"]
    assert scheduled.config["num_speculative_tokens"] == max(k for *_, k in ranges) <= 5
    assert ranges[0][0] == 1
    assert all(later[0] == earlier[1] + 1 and later[2] < earlier[2] for earlier, later in pairwise(ranges))


def test_sessions_begin_at_times_of_their_own() -> None:
    records = [
        TraceRecord(f"{n}", float(n % 5), session=f"{n // 5}", think_time_s=1.0 if n % 5 else None, prompt_tokens=9)
        for n in range(100)
    ]
    with pytest.raises(ValueError, match="all 20 sessions begin at the same time; give --rate"):
        sampled(records)
    last = sampled(records, rate=0.1).windows[-1][-1]
    assert last.arrived_s == pytest.approx(1000, rel=0.5)
