from __future__ import annotations

from array import array

import numpy as np
import pytest
from scipy.stats import binom

from backends.engine_metrics import EngineMetrics
from gateway.dialects.usage import Usage
from lab.bench.record import Drafting, Record
from lab.bench.report.statistics import Sample, acceptance, compare, distribution, failures, inter_token_s, timeline
from lab.statistics import Interval


def record(
    index: int, chunks_s: list[float], tokens: int | None, drafting: Drafting | None = None, error: str | None = None
) -> Record:
    usage = Usage(output_tokens=tokens) if tokens is not None else None
    return Record(index, 0.0, 0.0, 9.0, array("d", chunks_s), usage, drafting, error, "why" if error else "")


def test_a_distribution_is_in_milliseconds_with_linear_percentiles() -> None:
    times = distribution([0.001 * value for value in range(1, 101)])
    assert times is not None
    assert (times.mean, times.p50) == (pytest.approx(50.5), pytest.approx(50.5))
    assert times.p95 == pytest.approx(95.05)
    assert times.p99 == pytest.approx(99.01)
    assert (len(times.quantiles), times.quantiles[0], times.quantiles[100]) == (101, 1.0, 100.0)
    assert distribution([]) is None


def test_inter_token_times_do_not_cross_answers() -> None:
    itl = inter_token_s([record(0, [1.0, 1.5, 3.0], 3), record(1, [7.0], 1), record(2, [2.0, 2.25], 2)])
    assert itl.tolist() == [0.5, 1.5, 0.25]
    assert inter_token_s([]).size == 0


def test_failures_are_counted_by_kind() -> None:
    records = [record(0, [], None, error="connect"), record(1, [1.0], 1), record(2, [], None, error="http 400")]
    records.append(record(3, [], None, error="http 400"))
    assert [(one.kind, one.count, one.example) for one in failures(records)] == [
        ("http 400", 2, "why"),
        ("connect", 1, "why"),
    ]


def test_acceptance_comes_from_the_answers_that_report_it() -> None:
    done = [
        record(0, [1.0], 30, Drafting(10, 30, 18, (8, 6, 4))),
        record(1, [1.0], 20, Drafting(5, 10, 2, (2, 0))),
        record(2, [1.0], 500),  # no report: left out
    ]
    told = acceptance(done, EngineMetrics(), EngineMetrics(drafts=1, draft_tokens=1, accepted_tokens=1))
    assert told is not None
    assert told.source == "answers"
    assert told.rate == pytest.approx(20 / 40)
    assert told.length == pytest.approx(1 + 20 / 15)
    assert told.tokens_per_step == pytest.approx(50 / 30)
    assert told.by_position == pytest.approx((10 / 15, 6 / 15, 4 / 15))


def test_otherwise_acceptance_comes_from_the_difference_of_the_counters() -> None:
    before = EngineMetrics(
        drafts=100, draft_tokens=300, accepted_tokens=50, generation_tokens=400, accepted_per_position=(40, 8, 2)
    )
    after = EngineMetrics(
        drafts=200, draft_tokens=600, accepted_tokens=200, generation_tokens=700, accepted_per_position=(120, 58, 22)
    )
    told = acceptance([record(0, [1.0], 300)], before, after)
    assert told is not None
    assert (told.source, told.rate, told.length) == ("counters", 0.5, 2.5)
    assert told.tokens_per_step == pytest.approx(300 / 150)
    assert told.by_position == pytest.approx((0.8, 0.5, 0.2))


def test_counters_that_appear_during_the_run_start_at_zero() -> None:
    told = acceptance(
        [record(0, [1.0], 3)],
        EngineMetrics(),
        EngineMetrics(drafts=4, draft_tokens=8, accepted_tokens=5, generation_tokens=9, accepted_per_position=(3, 2)),
    )
    assert told is not None
    assert told.by_position == (0.75, 0.5)


def test_an_engine_that_drafted_nothing_has_no_acceptance() -> None:
    assert acceptance([record(0, [1.0], 3)], EngineMetrics(), EngineMetrics(generation_tokens=3)) is None


def test_without_counters_acceptance_is_tokens_per_chunk() -> None:
    told = acceptance([record(0, [1.0, 2.0], 5), record(1, [1.0, 2.0], 3)], None, None)
    assert told is not None
    assert (told.source, told.rate, told.length) == ("chunks", None, 2.0)
    assert acceptance([record(0, [1.0, 2.0], None)], None, None) is None


def sample(tpot_s: np.ndarray, *, closed: bool = True, sent_s: np.ndarray | None = None) -> Sample:
    records = []
    for index, tpot in enumerate(tpot_s):
        at_s = float(index if sent_s is None else sent_s[index])
        chunks = array("d", [at_s + 0.1, at_s + 0.1 + 99 * float(tpot)])
        records.append(Record(index, at_s, at_s, chunks[1], chunks, Usage(output_tokens=100)))
    total_s = sum(one.e2e_s for one in records)
    return Sample.of(records, len(records) * 100 / total_s if closed else 50.0, closed=closed)


def test_a_constant_speedup_of_paired_prompts_has_no_uncertainty() -> None:
    base = np.random.default_rng(0).lognormal(-4, 0.5, 200)
    throughput, tpot = compare(sample(base / 1.5), sample(base))
    assert tpot is not None
    assert (tpot.value, tpot.low, tpot.high) == (pytest.approx(1.5), pytest.approx(1.5), pytest.approx(1.5))
    assert throughput.low <= throughput.value <= throughput.high
    assert 1.3 < throughput.value < 1.5  # the time to first token is no faster


def test_intervals_cover_where_requests_share_batches() -> None:
    """Requests that run together are slow together: half of the variance is common to eight in a row."""
    covered, of_requests = 0, 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        run, base = (
            np.exp(mean + 0.2 * np.repeat(random.normal(size=32), 8) + 0.2 * random.normal(size=256))
            for mean in (-4.0, -3.8)
        )
        _, tpot = compare(sample(run), sample(base))
        assert tpot is not None
        assert tpot.is_known
        covered += tpot.low <= np.exp(0.2) <= tpot.high  # the ratio of the medians
        error = np.sqrt(2 * np.pi / 2 * 0.08 / 256)  # of the log of a ratio of medians of independent values
        of_requests += abs(np.log(tpot.value) - 0.2) <= 1.96 * error
    assert covered >= binom.ppf(0.001, 200, 0.95)
    assert of_requests < 0.8 * 200


def test_a_run_as_long_as_its_longest_request_has_no_interval() -> None:
    base = np.random.default_rng(0).lognormal(-4, 0.5, 64)
    throughput, tpot = compare(sample(base / 2, sent_s=np.zeros(64)), sample(base, sent_s=np.zeros(64)))
    assert tpot == Interval(pytest.approx(2.0))
    assert not throughput.is_known


def test_an_open_loop_gains_no_throughput_from_faster_answers() -> None:
    base = np.random.default_rng(0).lognormal(-4, 0.5, 100)
    throughput, tpot = compare(sample(base / 2, closed=False), sample(base, closed=False))
    assert throughput.value == pytest.approx(1.0)
    assert tpot is not None
    assert tpot.value == pytest.approx(2.0)


def test_answers_of_one_token_have_no_tpot_to_compare() -> None:
    records = [record(index, [0.1], 1) for index in range(5)]
    one = Sample.of(records, 10.0, closed=True)
    throughput, tpot = compare(one, one)
    assert tpot is None
    assert throughput.value == 1.0


def test_the_course_of_a_run() -> None:
    records = [
        Record(0, due_s=10.0, sent_s=10.0, ended_s=40.0, chunks_s=array("d", [11.0, 12.0])),
        Record(1, due_s=20.0, sent_s=20.0, ended_s=25.0, chunks_s=array("d", [21.0])),
    ]
    course = timeline(records, 10.0, 40.0)
    assert course is not None
    assert course.interval_s == 1.0
    assert course.in_flight == (1,) * 10 + (2,) * 5 + (1,) * 15
    assert [index for index, rate in enumerate(course.sent_per_s) if rate] == [0, 10]
    assert {index: rate for index, rate in enumerate(course.output_tokens_per_s) if rate} == {15: 1.0, 29: 2.0}
    assert timeline([], 0.0, 1.0) is None
