"""Event streams: what is passed on, counted, and read at the end."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.sse import EventStream, is_event_stream
from policies.features.request import Endpoint
from tests.support.upstream import END, delta

DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}\n\n'


@given(cuts=st.lists(st.integers(0, 90), max_size=12))
def test_a_stream_with_cr_line_ends_is_passed_on_with_lf(cuts: list[int]) -> None:
    whole = b'event: a\rdata: {"x": "\\r"}\r\rdata: {"error": {"code": 400}}\r\rdata: [DONE]\r\r'
    stream, passed = EventStream(Endpoint.CHAT), b""
    for start, end in itertools.pairwise(sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})):
        passed += stream.feed(whole[start:end])
    assert passed == whole.replace(b"\r", b"\n")
    assert stream.events == 3
    assert stream.ending.is_complete


def test_the_line_ends_of_half_an_event_are_the_same_however_it_was_read() -> None:
    half = b'data: {"choices":\r[]}\n'
    for reads in ([half], [half[:9], half[9:]]):
        stream = EventStream(Endpoint.CHAT)
        assert b"".join(map(stream.feed, reads)) + stream.rest() == half.replace(b"\r", b"\n")


def test_an_event_without_end_is_held_only_up_to_a_limit() -> None:
    stream = EventStream(Endpoint.CHAT)
    assert stream.feed(b"x" * (1 << 20)) == b""
    assert len(stream.feed(b"x" * 10)) == (1 << 20) + 10


def test_an_event_in_tiny_pieces_is_not_copied_for_each() -> None:
    whole = b"data: " + b"x" * 300_000 + b"\n\n"
    stream, began_s = EventStream(Endpoint.CHAT), time.process_time()
    assert b"".join(stream.feed(whole[at : at + 8]) for at in range(0, len(whole), 8)) == whole
    assert time.process_time() - began_s < 4.0, "with a copy for each piece, more than a minute"


def test_usage_is_found_however_the_reads_split_the_stream() -> None:
    for reads in ([delta("a"), USAGE, DONE], [delta("a") + USAGE + DONE], [delta("a"), USAGE + DONE]):
        stream = EventStream(Endpoint.CHAT)
        for read in reads:
            stream.feed(read)
        assert any("usage" in document for document in stream.last_documents())


@pytest.mark.parametrize("with_usage", [True, False])
def test_content_chunks_of_a_chat_stream(with_usage: bool) -> None:
    stream = EventStream(Endpoint.CHAT)
    for text in ("", "one", "two"):  # the first chunk is the role; the last one is that of the end
        stream.feed(delta(text))
    if with_usage:
        stream.feed(USAGE)
    stream.feed(END)
    assert stream.content_chunks(Endpoint.CHAT, with_usage=with_usage) == 3


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
