from __future__ import annotations

import json
from typing import Any

import pytest

from lab.live.record import AnswerReader, Record, error_message


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


def test_every_chunk_of_a_completion_counts() -> None:
    text = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    record = read(event(text), event(text), b"data: [DONE]\n\n")
    assert len(record.chunks_s) == 2


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
        (b"<html>bad gateway", "<html>bad gateway"),
        (b"[]", "[]"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_the_message_of_an_error(body: bytes, message: str) -> None:
    assert error_message(body) == message
