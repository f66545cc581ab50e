"""Speedups of a run."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from scipy.stats import binom

from gateway.dialects.usage import Usage
from lab.bench.run import Condition, Run, Speedup
from lab.bench.targets import Target
from lab.live.endpoints import LiveEndpoint
from lab.live.generator import GeneratorHealth
from lab.live.record import Record
from lab.live.session import LiveOutcome
from lab.statistics import Floats, Interval
from lab.trace.record import TraceRecord

ENDPOINT = LiveEndpoint.of("--url", "http://127.0.0.1:1", None, None)


def run(tpot_s: Floats, sent_s: Floats | None = None, tokens: int = 100) -> Run:
    records = []
    for index, tpot in enumerate(tpot_s):
        at_s = float(index if sent_s is None else sent_s[index])
        chunks = array("d", [at_s + 0.1, at_s + 0.1 + (tokens - 1) * float(tpot)])
        records.append(Record(index, at_s, at_s, chunks[1], chunks, Usage(output_tokens=tokens)))
    trace = [TraceRecord() for _ in records]
    outcome = LiveOutcome(ENDPOINT, "m", trace, records, GeneratorHealth(0.0, 0.0), 0)
    return Run(Target("a", None, None), Condition(None, 1.0), outcome, None)


def speedup(own: Run, baseline: Run) -> Speedup:
    compared = own.compared(baseline).speedup
    assert compared is not None
    return compared


@pytest.mark.slow
def test_intervals_cover_where_requests_share_batches() -> None:
    """Requests that run together are slow together: half of the variance is common to eight in a row."""
    covered = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        own, base = (
            np.exp(mean + 0.2 * np.repeat(random.normal(size=32), 8) + 0.2 * random.normal(size=256))
            for mean in (-4.0, -3.8)
        )
        tpot = speedup(run(own), run(base)).tpot
        assert tpot is not None
        assert tpot.is_known
        covered += tpot.low <= np.exp(0.2) <= tpot.high  # the ratio of the means
    assert covered >= binom.ppf(0.001, 200, 0.95)


def test_a_run_as_long_as_its_longest_request_has_no_interval() -> None:
    base, at_once = np.random.default_rng(0).lognormal(-4, 0.5, 64), np.zeros(64)
    assert speedup(run(base / 2, at_once), run(base, at_once)).tpot == Interval(pytest.approx(2.0))


def test_answers_of_one_token_have_no_tpot_to_compare() -> None:
    one, other = run(np.ones(5), tokens=1), run(np.ones(5), tokens=1)
    gained = speedup(one, other)
    assert gained.tpot is None
    assert gained.e2e is not None
    assert gained.e2e.value == pytest.approx(1.0)
    assert one.compared(one).speedup is None
