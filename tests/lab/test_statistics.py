"""Intervals cover the truth as often as they say, where the truth is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from backends.speculation import Method
from lab.replay.comparison import ratio
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.simulate import Replayed, replay
from lab.simulation.table import RequestTable, request_table
from lab.statistics import REPLICATIONS, Interval, of_replications, of_units, summary
from lab.trace.record import TraceRecord
from policies.build import build
from policies.policy import policies

CALIBRATION = "llama-3.1-8b-h100"
POOL = [
    ReplicaSpec("plain", Method.BASELINE, {}, CALIBRATION, kv_blocks=400),
    ReplicaSpec("head", Method.EAGLE3, {"num_speculative_tokens": 3}, CALIBRATION, kv_blocks=400),
]
PER_S = 20.8
"""Requests a second that the pool serves if all come at once: some ten run on each replica, and others wait."""
TRACES, REQUESTS, WARMUP = 24, 300, 50


def traffic(seed: int, per_s: float) -> list[TraceRecord]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / per_s, REQUESTS)).tolist()
    prompts = rng.lognormal(5.5, 1.0, REQUESTS).clip(8, 4000).astype(int).tolist()
    answers = rng.lognormal(4.5, 0.9, REQUESTS).clip(2, 1024).astype(int).tolist()
    return [
        TraceRecord(arrived_at=at, temperature=0.0, prompt_tokens=prompt, output_tokens=answer)
        for at, prompt, answer in zip(times, prompts, answers, strict=True)
    ]


def table(records: list[TraceRecord]) -> RequestTable:
    with request_table(records, 0.0) as requests:
        assert requests[0]  # once it is open, it outlives its file
        return requests.paced(requests.arrived_at)


def played(requests: RequestTable, policy: str, seed: int) -> Replayed:
    settings = policies()[policy].Settings.model_validate({"seed": 0} if policy == "least_loaded" else {})
    return replay(POOL, requests, build(policy, settings), seed=seed, warmup=WARMUP)


def lost(requests: RequestTable, seed: int) -> float:
    """Return the mean time to finish under `round_robin` over that under `least_loaded`."""
    value = ratio(played(requests, "round_robin", seed), played(requests, "least_loaded", seed), "e2e_s")
    assert value is not None
    return value


def least(count: int) -> int:
    """Return the hits of which fewer come once in a thousand times if the coverage is 95%."""
    return int(binom.ppf(0.001, count, 0.95))


def hits(intervals: list[Interval], truth: float) -> int:
    assert all(one.is_known for one in intervals)
    return sum(one.low <= truth <= one.high for one in intervals)


@pytest.mark.slow
def test_replications_cover_where_requests_queue() -> None:
    values, found = [], []
    for seed in range(1, TRACES + 1):
        requests = table(traffic(seed, 0.95 * PER_S))
        values.append(lost(requests, seed))
        others = [lost(requests.resampled(number), seed + number) for number in range(1, REPLICATIONS + 1)]
        found.append(of_replications(values[-1], others))
    assert hits(found, float(np.mean(values))) >= least(TRACES)
    assert np.median([one.high - one.low for one in found]) < 3 * (
        np.quantile(values, 0.975) - np.quantile(values, 0.025)
    )


def test_units_cover_a_ratio_whatever_they_have_in_common() -> None:
    found = []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        common = rng.lognormal(0, 0.3, 7)
        found.append(of_units(0.9 * common * rng.normal(1, 0.05, 7), common * rng.normal(1, 0.05, 7)))
    assert hits(found, 0.9) >= least(400)
    assert np.median([one.high - one.low for one in found]) < 0.2


def test_too_few_give_the_value_alone_and_sums_of_zero_are_refused() -> None:
    assert of_replications(0.9, [0.8]) == of_units(np.array([9.0]), np.array([10.0])) == Interval(0.9)
    assert not Interval(0.9).is_known
    assert Interval(0.75, 0.5, 1.0).saved() == Interval(0.25, 0.0, 0.5)
    assert Interval(1.5, 1.25, 2.0).less_one() == Interval(0.5, 0.25, 1.0)
    with pytest.raises(ValueError, match="must be positive"):
        of_units(np.zeros(8), np.ones(8))


def test_a_summary_leaves_out_what_is_not_known() -> None:
    assert summary(np.array([np.nan])) == dict.fromkeys(("mean", "p50", "p90", "p99"))


def test_resampled_traffic_is_other_traffic_of_the_same_hours() -> None:
    """A trace that is ten times as busy in its second half."""
    records = traffic(3, 10.0)
    at_s = np.cumsum(np.where(np.arange(REQUESTS) < REQUESTS / 2, 1.0, 0.1))
    requests = table([replace(record, arrived_at=float(at)) for record, at in zip(records, at_s, strict=True)])
    one, again, other = (requests.resampled(seed).order.arrived_s for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    gaps_s = np.diff(one)
    quarter = REQUESTS // 4
    assert gaps_s[:quarter].mean() == pytest.approx(1.0)
    assert gaps_s[-quarter:].mean() == pytest.approx(0.1)


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("count", [4, 20, 32, 64])
def test_a_short_trace_is_resampled_with_the_spread_of_a_sample(count: int, sessions: bool) -> None:
    records = traffic(5, 10.0)[:count]
    think_s = 0.5 if sessions else None
    requests = table([replace(one, session=f"{at}", think_time_s=think_s) for at, one in enumerate(records)])
    of_samples = requests.tokens.std() / math.sqrt(count)
    of_draws = np.std([requests.resampled(seed).tokens.mean() for seed in range(200)])
    assert 0.6 * of_samples < of_draws < 1.2 * of_samples
    assert not requests.is_one
    assert requests[:1].is_one


def test_sessions_are_resampled_whole() -> None:
    records = [
        TraceRecord(
            arrived_at=10.0 * (number // 3) + number % 3, session=f"s{number // 3}", prompt_tokens=100 + number,
            output_tokens=9, think_time_s=None if number % 3 == 0 else 0.5,
        )
        for number in range(120)
    ]  # fmt: skip
    with request_table(records, 0.0) as requests:
        drawn = requests.in_sessions(None, 1.0, 1, 0).resampled(5)
        by_session: dict[str, list[int]] = {}
        for request in drawn:
            by_session.setdefault(request.session, []).append(request.prompt_tokens - 100)
    assert len(by_session) == 40
    assert all(numbers == [3 * (numbers[0] // 3) + turn for turn in range(3)] for numbers in by_session.values())
    assert len({numbers[0] for numbers in by_session.values()}) < 40  # some come twice
