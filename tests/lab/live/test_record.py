"""What is recorded of each request, and the result of a run."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from gateway.dialects.usage import Usage
from lab.live.endpoints import LiveEndpoint
from lab.live.generator import GeneratorHealth
from lab.live.record import AnswerReader, Record, error_message
from lab.live.session import LiveOutcome
from lab.trace.record import TraceRecord


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def delta(**fields: Any) -> dict[str, Any]:
    finish_reason = fields.pop("finish_reason", None)
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


STREAM = (
    event(delta(role="assistant", content=""))
    + b": a comment\n\n"
    + event(delta(content="one\n\ndata: two"))
    + event(delta(content=" \u2028 three"))
    + event(delta(content="", finish_reason="stop"))
    + event(
        {
            "choices": [],
            "usage": {"prompt_tokens": 7, "completion_tokens": 15, "prompt_tokens_details": {"cached_tokens": 4}},
        }
    )
    + b"data: [DONE]\n\n"
)


def read(*pieces: bytes) -> Record:
    record = Record(0, 0.0, sent_s=10.0)
    reader = AnswerReader(record)
    for index, piece in enumerate(pieces):
        reader.feed(piece, 10.0 + index)
    reader.close()
    return record


@pytest.mark.parametrize("cut", range(1, len(STREAM), 7))
def test_a_stream_can_be_split_anywhere(cut: int) -> None:
    record = read(STREAM[:cut], STREAM[cut:])
    assert record.error is None
    assert len(record.chunks_s) == 3
    assert record.output_tokens == 15
    assert record.usage is not None
    assert (record.usage.prompt_tokens, record.usage.cached_tokens) == (7, 4)


def test_only_chunks_with_output_have_times() -> None:
    head, *events = STREAM.split(b"\n\n")
    record = read(*(piece + b"\n\n" for piece in (head, *events[:-1])))
    assert list(record.chunks_s) == [12.0, 13.0, 14.0]  # not the role at 10, the comment, the usage
    assert (record.ttft_s, record.e2e_s) == (2.0, 4.0)
    assert record.tpot_s == pytest.approx(2.0 / 14)


def test_without_usage_chunks_are_counted() -> None:
    record = read(event(delta(content="a")), event(delta(content="b", finish_reason="length")))
    assert record.error is None
    assert record.output_tokens == 2
    assert record.tpot_s == 1.0


@pytest.mark.parametrize(
    ("stream", "error", "detail"),
    [
        (b"data: [DONE]\n\n", "empty", "no chunk"),
        (event(delta(role="assistant", content="")) + b"data: [DONE]\n\n", "empty", "no chunk"),
        (event(delta(content="a")), "cut off", "without a finish_reason"),
        (b"data: {oh\n\n", "garbage", "not JSON"),
        (b"data: 3\n\n", "garbage", "not an object"),
        (b'data: {"choices": [null]}\n\ndata: [DONE]\n\n', "empty", "no chunk"),
        (event({"error": {"message": "busy", "code": 503}}) + b"data: [DONE]\n\n", "engine error 503", "busy"),
        (event({"error": "oh"}) + b"data: [DONE]\n\n", "engine error", "oh"),
    ],
)
def test_an_invalid_answer_is_a_failure(stream: bytes, error: str, detail: str) -> None:
    record = read(stream)
    assert record.error == error
    assert detail in record.detail


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "plain"}', '{"error": "plain"}'),
        (b"[]", "[]"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_the_message_of_an_error(body: bytes, message: str) -> None:
    assert error_message(body) == message


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
    usage = Usage(prompt_tokens=8)
    usage.cached_tokens = 4
    done = Record(0, 0.0, chunks_s=array("d", [1.0]), usage=usage)
    notes = " ".join(outcome(done, health=GeneratorHealth(0.95, 0.2)).notes())
    shares = ("had 89% of the trace's tokens", "50% of the prompt tokens")
    for said in (*shares, "Answers had no usage", "used 95% of a core", "up to 200 ms late"):
        assert said in notes
