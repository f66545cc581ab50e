"""Event streams: what is passed on, counted, and read at the end."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.sse import EventStream, engine_error, is_event_stream
from policies.features.request import Endpoint
from tests.support.upstream import delta

DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}\n\n'


@given(
    texts=st.lists(st.text(max_size=30), max_size=8),
    separator=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
)
def test_all_bytes_are_passed_on_as_whole_events(texts: list[str], separator: bytes, cuts: list[int]) -> None:
    whole = b"".join(b"data: " + json.dumps(text).encode() + separator for text in texts)
    stream = EventStream(Endpoint.CHAT)
    offsets = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    passed = b""
    for start, end in itertools.pairwise(offsets):
        part = stream.feed(whole[start:end])
        assert part == b"" or part.endswith(separator)
        passed += part
    assert passed + stream.rest() == whole
    assert stream.events == len(texts)


@given(cuts=st.lists(st.integers(0, 90), max_size=12))
def test_a_stream_with_cr_line_ends_is_passed_on_with_lf(cuts: list[int]) -> None:
    whole = b'event: a\rdata: {"x": "\\r"}\r\rdata: 2\r\rdata: [DONE]\r\r'
    stream, passed = EventStream(Endpoint.CHAT), b""
    for start, end in itertools.pairwise(sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})):
        passed += stream.feed(whole[start:end])
    assert passed == whole.replace(b"\r", b"\n")
    assert stream.events == 3
    assert stream.is_complete(Endpoint.CHAT)


def test_an_event_without_end_is_held_only_up_to_a_limit() -> None:
    stream = EventStream(Endpoint.CHAT)
    assert stream.feed(b"x" * (1 << 20)) == b""
    assert len(stream.feed(b"x" * 10)) == (1 << 20) + 10


def test_usage_is_found_however_the_reads_split_the_stream() -> None:
    for reads in ([delta("a"), USAGE, DONE], [delta("a") + USAGE + DONE], [delta("a"), USAGE + DONE]):
        stream = EventStream(Endpoint.CHAT)
        for read in reads:
            stream.feed(read)
        assert any("usage" in document for document in stream.last_documents())


@pytest.mark.parametrize(("with_usage", "expected"), [(True, 3), (False, 3)])
def test_content_chunks_of_a_chat_stream(with_usage: bool, expected: int) -> None:
    stream = EventStream(Endpoint.CHAT)
    for text in ("", "one", "two", "three"):  # the first chunk is the role
        stream.feed(delta(text))
    if with_usage:
        stream.feed(USAGE)
    stream.feed(DONE)
    assert stream.content_chunks(Endpoint.CHAT, with_usage=with_usage) == expected


def test_content_chunks_of_streams_with_marked_deltas() -> None:
    stream = EventStream(Endpoint.MESSAGES)
    stream.feed(b'event: message_start\ndata: {"type": "message_start"}\n\n')
    for _ in range(4):
        stream.feed(b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n')
    stream.feed(b'event: message_stop\ndata: {"type": "message_stop"}\n\n')
    assert stream.content_chunks(Endpoint.MESSAGES, with_usage=True) == 4
    stream = EventStream(Endpoint.RESPONSES)
    stream.feed(b"event: response.created\ndata: {}\n\n")
    stream.feed(b"event: response.output_text.delta\ndata: {}\n\n" * 3)
    assert stream.content_chunks(Endpoint.RESPONSES, with_usage=True) == 3


def test_event_streams_are_recognized_by_their_beginning() -> None:
    for stream in (b"data: x\n\n", b"event: y\ndata: x\n\n", b": ping\n\n", b"\n\ndata: x\n\n", b"id: 1\n\n"):
        assert is_event_stream(stream)
    for other in (b"<html>\n\n", b"hello\n\n"):
        assert not is_event_stream(other)


def test_engine_errors_at_the_beginning_of_a_stream() -> None:
    assert engine_error(b'data: {"error": {"message": "busy", "code": 503}}\n\ndata: [DONE]\n\n') == 503
    assert not engine_error(b'data: {"error": {"message": "your fault", "code": 400}}\n\n')
    assert not engine_error(b'data: {"error": {"message": "no status", "code": 775}}\n\n')
    assert not engine_error(delta('an "error" in the text'))
    assert not engine_error(b'data: {"error": \n\n')


@pytest.mark.parametrize(
    ("endpoint", "last", "is_complete"),
    [
        (Endpoint.CHAT, DONE, True),
        (Endpoint.COMPLETIONS, b"data:[DONE]\r\n\r\n", True),
        (Endpoint.CHAT, USAGE, False),
        (Endpoint.CHAT, delta("data: [DONE]"), False),
        (Endpoint.MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (Endpoint.MESSAGES, b'event: message_delta\ndata: {"type":"message_delta"}\n\n', False),
        (Endpoint.MESSAGES, b'data: {"type":["message_stop"]}\n\n', False),
        (Endpoint.RESPONSES, b'data: {"type":"response.completed","response":{}}\n\n', True),
        (Endpoint.RESPONSES, b'data: {"type":"response.incomplete"}\n\n', True),
        (Endpoint.RESPONSES, b'data: {"type":"response.failed"}\n\n', True),
        (Endpoint.RESPONSES, b'data: {"type":"response.output_text.done"}\n\n', False),
    ],
)
def test_a_stream_is_complete_with_the_last_event_of_its_api(
    endpoint: Endpoint, last: bytes, is_complete: bool
) -> None:
    stream = EventStream(endpoint)
    stream.feed(delta("one"))
    assert not stream.is_complete(endpoint)
    stream.feed(last[:-3])
    assert not stream.is_complete(endpoint)
    stream.feed(last[-3:])
    assert stream.is_complete(endpoint) is is_complete
