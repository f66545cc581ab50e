"""The result of a run, from its records."""

from __future__ import annotations

from array import array

from lab.live.endpoints import LiveEndpoint
from lab.live.generator import GeneratorHealth
from lab.live.record import Record
from lab.live.session import LiveOutcome
from lab.trace.record import TraceRecord

ENDPOINT = LiveEndpoint.of("http://127.0.0.1:1", None, None)


def outcome(*records: Record, health: GeneratorHealth | None = None) -> LiveOutcome:
    trace = [TraceRecord(prompt_tokens=9) for _ in range(9)]
    return LiveOutcome(ENDPOINT, "m", trace, records, health or GeneratorHealth(0.1, 0.0), warmup=0)


def test_times_count_from_the_first_request_of_the_run_and_requests_keep_their_order() -> None:
    result, backends = outcome(
        Record(0, due_s=900.0, sent_s=900.0, ended_s=901.0, error="timeout"),
        Record(2, due_s=907.0, sent_s=907.0, chunks_s=array("d", [908.0, 909.0]), backend="b"),
        Record(1, due_s=905.0, sent_s=905.0, chunks_s=array("d", [906.0, 911.0]), backend="a"),
        Record(3, due_s=911.0, sent_s=911.0, error="interrupted"),
    ).replayed()
    assert (result.number.tolist(), result.arrived_s.tolist(), result.e2e_s.tolist()) == (
        [1, 2],
        [5.0, 7.0],
        [6.0, 2.0],
    )
    assert [backends[index] for index in result.backend] == ["a", "b"]
    assert (result.errors, result.duration_s) == (1, 6.0)


def test_failures_are_counted_by_kind_with_the_first_message() -> None:
    kinds = [("connect", "refused"), ("http 400", "too long"), ("http 400", "no")]
    records = [Record(number, 0.0, error=kind, detail=why) for number, (kind, why) in enumerate(kinds)]
    assert list(outcome(*records).failures.items()) == [("http 400", (2, "too long")), ("connect", (1, "refused"))]


def test_a_generator_that_was_busy_or_late_is_a_reason_to_doubt_the_figures() -> None:
    done = Record(0, 0.0, chunks_s=array("d", [1.0]))
    notes = " ".join(outcome(done, health=GeneratorHealth(0.95, 0.2)).notes())
    for said in ("Answers had no usage", "used 95% of a core", "up to 200 ms late"):
        assert said in notes
