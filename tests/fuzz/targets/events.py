"""Event streams: any cut gives the same bytes out, whole events at a time, and the same last documents.

The first byte is the seed of the cuts, with two bits for the endpoint. The rest is the body of a stream.
"""

from __future__ import annotations

from gateway.dialects.ending import events_of
from gateway.dialects.sse import EventStream, is_event_stream
from gateway.dialects.transcript import read_answer
from gateway.dialects.usage import read_usage
from policies.features.request import Endpoint
from tests.fuzz.held import held_bytes
from tests.fuzz.wire import cut

_ENDPOINTS = (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES, Endpoint.RESPONSES)
_HELD_BYTES = 4096
_GOES_ON = b'"finish_reason":null'


def fuzz_one(data: bytes) -> None:
    """Pass a stream on in one piece and cut, and compare."""
    flags, body = (data[0], data[1:]) if data else (0, b"")
    endpoint, seed = _ENDPOINTS[flags & 3], flags >> 2
    whole, cut_up = EventStream(endpoint), EventStream(endpoint)
    if any(event.count(_GOES_ON) > 1 for event in events_of(body)):
        return  # no event has two choices if one was asked for
    passed_whole = whole.feed(body)
    if not whole.withheld:
        passed_whole += whole.rest()
        assert _lines(passed_whole + whole.withheld) == _lines(body)
    passed = b""
    for piece in cut(body, seed):
        part = cut_up.feed(piece)
        assert not part or part.endswith((b"\n\n", b"\r\n\r\n")), f"half an event is passed on: {part!r}"
        passed += part
        assert held_bytes(cut_up) < 2 * len(body) + _HELD_BYTES
        if cut_up.withheld:
            break
    if not cut_up.withheld:
        passed += cut_up.rest()
    # Blank lines between events say nothing: a read may end before them, or after.
    ends = [_lines(data).rstrip(b"\n") for data in (passed, passed_whole)]
    assert ends[0] == ends[1], "the end depends on how the stream is cut"
    documents = list(cut_up.last_documents())
    assert documents == list(whole.last_documents())[: len(documents)]
    for document in documents:
        usage = read_usage(document)
        assert usage is None or usage.tokens_per_step is None or usage.tokens_per_step > 0
    for stream in (whole, cut_up):
        assert stream.content_chunks(endpoint, with_usage=True) >= 0
    is_event_stream(body)
    assert whole.ending.error_status == 0 or 400 <= whole.ending.error_status < 600
    assert isinstance(read_answer(endpoint, body, stream=True).text, str)
    assert isinstance(read_answer(endpoint, body, stream=False).text, str)


def _lines(data: bytes) -> bytes:
    """Return data with LF for CR, which is passed on so where it ends lines."""
    return data.replace(b"\r", b"\n")
