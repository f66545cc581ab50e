"""The result of a run, from its records."""

from __future__ import annotations

from array import array

from lab.bench.record import Record
from lab.live.run import replayed


def test_times_count_from_the_first_request_of_the_run_and_requests_keep_their_order() -> None:
    records = [
        Record(0, due_s=900.0, sent_s=900.0, ended_s=901.0, error="timeout"),
        Record(2, due_s=907.0, sent_s=907.0, chunks_s=array("d", [908.0, 909.0]), backend="b"),
        Record(1, due_s=905.0, sent_s=905.0, chunks_s=array("d", [906.0, 911.0]), backend="a"),
    ]
    result, backends = replayed(records, warmup=0)
    assert (result.number.tolist(), result.arrived_s.tolist(), result.e2e_s.tolist()) == (
        [1, 2],
        [5.0, 7.0],
        [6.0, 2.0],
    )
    assert [backends[index] for index in result.backend] == ["a", "b"]
    assert (result.errors, result.duration_s) == (1, 6.0)
