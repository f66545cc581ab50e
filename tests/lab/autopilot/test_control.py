"""The comparison of a fleet with the one before a change: what it finds, and what it must not find."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.autopilot.control import BLOCK_S, Compared, Seen, compare
from lab.autopilot.traffic import seen
from lab.trace import TraceRecord

HOUR_S = 3600.0
QUICK, SLOW = ("code", 1), ("chat", 1)


def period(
    rng: np.random.Generator, start_s: float, hours: float, code: float, factor: float = 1.0, failed: float = 0.0
) -> list[Seen]:
    """Return requests whose neighbours wait in the same queues, chats taking three times as long as code."""
    count = round(400 * hours)
    at_s = np.sort(rng.uniform(start_s, start_s + hours * HOUR_S, count))
    queue = dict.fromkeys((at_s // BLOCK_S).astype(int).tolist(), 0.0)
    queue = {block: rng.normal(0.0, 0.1) for block in queue}
    requests = []
    for each in at_s.tolist():
        is_code = rng.random() < code
        value = math.log(factor * (1.0 if is_code else 3.0)) + queue[int(each // BLOCK_S)] + rng.normal(0.0, 0.4)
        requests.append(Seen(each, QUICK if is_code else SLOW, math.nan if rng.random() < failed else value))
    return requests


def judged(seed: int, factor: float = 1.0, failed: float = 0.0) -> Compared:
    rng = np.random.default_rng(seed)
    return compare(period(rng, 0.0, 6, code=0.8), period(rng, 6 * HOUR_S, 2, code=0.2, factor=factor, failed=failed))


def test_other_kinds_of_requests_are_no_loss_and_a_loss_is_found() -> None:
    same, loss = [judged(seed) for seed in range(40)], [judged(seed, 1.25) for seed in range(40)]
    assert not any(one.is_loss(0.02) for one in same)  # although the mean time has doubled
    assert sum(one.low <= 1.0 <= one.high for one in same) >= 39
    assert np.mean([one.ratio for one in loss]) == pytest.approx(1.25, rel=0.03)
    assert sum(one.is_loss(0.02) for one in loss) >= 35


def test_failing_engines_are_a_loss_whatever_the_times() -> None:
    worse = judged(1, factor=0.8, failed=0.05)
    assert (worse.fails_more, worse.is_loss(0.02)) == (True, True)
    assert "engines failed" in str(worse)


def test_requests_without_their_like_are_not_compared() -> None:
    rng = np.random.default_rng(2)
    before, after = period(rng, 0.0, 6, code=1.0), period(rng, 6 * HOUR_S, 2, code=0.1)
    compared = compare(before, after)
    assert math.isnan(compared.low)
    assert not compared.is_loss(0.02)
    assert "not comparable yet: 10%" in str(compared) or compared.matched < 0.2
    few = compare(period(rng, 0.0, 0.3, code=0.5), period(rng, HOUR_S, 0.3, code=0.5))
    assert math.isnan(few.low)  # too few blocks of time


def test_load_is_that_of_arrivals_and_not_of_requests_in_flight() -> None:
    def records(per_s: float, in_flight: int) -> list[TraceRecord]:
        return [
            TraceRecord(
                arrived_at=number / per_s, endpoint="chat", status=200, e2e_s=2.0, output_tokens=100, prompt_tokens=50,
                in_flight=in_flight, workload="code", stream=True,
            )
            for number in range(600)
        ]  # fmt: skip

    quick, slow, busy = (seen(each)[-1].stratum for each in (records(3.0, 3), records(3.0, 30), records(6.0, 3)))
    assert quick == slow
    assert quick != busy
    assert seen(records(1.5, 3), sample=0.5)[-1].stratum == quick
    failing = [TraceRecord(arrived_at=float(at_s), endpoint="chat", status=503, error="refused") for at_s in range(90)]
    assert [math.isnan(one.value) for one in seen(failing)] == [True] * 30  # none of the first minute
