"""Closed-loop replay: requests that wait for the answer before them."""

from __future__ import annotations

import numpy as np
import pytest

from backends.speculation import Method
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest, replay_request
from lab.simulation.simulate import Replayed, replay
from lab.simulation.table import request_table
from lab.trace.read import read_trace
from lab.trace.record import TraceRecord
from policies.balancing.least_loaded import LeastLoaded
from policies.load_policy import LoadSettings
from tests.support.paths import DATA

SESSION = DATA / "made_up" / "weka.json"


def record(at_s: float, session: str = "a", think_time_s: float | None = None, prompt_tokens: int = 640) -> TraceRecord:
    return TraceRecord(
        arrived_at=at_s,
        session=session,
        think_time_s=think_time_s,
        prompt_tokens=prompt_tokens,
        output_tokens=50,
        prefix_blocks=list(range(prompt_tokens // 64)),
        block_tokens=64,
    )


def played(
    requests: list[ReplayRequest], calibration: str = "llama-3.1-8b-h100", kv_blocks: int | None = None
) -> Replayed:
    pool = [ReplicaSpec("a", Method.BASELINE, {}, calibration, kv_blocks=kv_blocks)]
    return replay(pool, requests, LeastLoaded(LoadSettings(seed=1)))


def requests_of(*records: TraceRecord) -> list[ReplayRequest]:
    return [replay_request(one, one.arrived_at or 0.0, 0.0) for one in records]


def test_a_request_follows_the_simulated_answer() -> None:
    given = requests_of(record(0.0), record(1.0, think_time_s=2.5), record(2.0, "b"), record(9.0, think_time_s=0.5))
    fast, slow = played(given), played(given, "llama-3.1-70b-4xh100")
    for one in (fast, slow):
        ends_s = one.arrived_s + one.e2e_s
        assert one.arrived_s[1] == pytest.approx(ends_s[0] + 2.5)
        assert one.arrived_s[3] == pytest.approx(ends_s[1] + 0.5)
        assert one.arrived_s[2] == 2.0
    assert slow.arrived_s[3] > fast.arrived_s[3]


def test_a_request_without_a_think_time_keeps_its_distance() -> None:
    given = requests_of(record(0.0), record(0.5, think_time_s=4.0), record(0.75))
    one = played(given)
    assert one.arrived_s[2] == pytest.approx(one.arrived_s[1] + 0.25)


def test_a_refused_request_does_not_end_its_session() -> None:
    given = requests_of(record(0.0, prompt_tokens=200_000), record(1.0, think_time_s=2.0))
    one = played(given)
    assert (one.errors, one.number.tolist(), one.arrived_s.tolist()) == (1, [1], [2.0])


def test_copies_of_sessions_share_no_prefix_and_begin_at_random() -> None:
    with request_table(read_trace([SESSION]), 1.0) as table:
        assert not table.order.is_open
        copied = table.in_sessions(rate=1.0, speed=1.0, copies=3, seed=1)
        assert len(copied) == 3 * len(table)
        again = table.in_sessions(rate=None, speed=1.0, copies=1, seed=1)
        assert [one.prefix_blocks for one in again] == [one.prefix_blocks for one in table]
        assert again.order.arrived_s.tolist() == table.arrived_at.tolist()
        by_copy: dict[str, set[int]] = {}
        begins_s: dict[str, float] = {}
        for one in copied:
            copy = one.session.partition("#")[2]
            by_copy.setdefault(copy, set()).update(one.prefix_blocks)
            begins_s.setdefault(one.session, one.arrived_s)
            assert [block >> 2 for block in one.prefix_blocks[::4]] == list(one.features.prefix) or copy
    assert len(set().union(*by_copy.values())) == sum(map(len, by_copy.values()))
    assert len({round(at_s, 6) for at_s in begins_s.values()}) == 6
    assert (np.diff([one.arrived_s for one in copied]) >= 0).all()
