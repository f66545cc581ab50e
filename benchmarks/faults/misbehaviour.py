"""The ways in which a replica answers, most of them wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.faults.asking import MODEL
from benchmarks.faults.wire import Wire, framed

Behaviour = Callable[[Wire], Awaitable[None]]
STANDS_STILL, ASLEEP = "stands-still", "asleep"
"""These answer nothing, and their metrics say that they have no request."""
OTHER_MODEL, OTHER_KEY = "other-model", "other-key"
HUGE_BYTES = 4 << 20
_MOST_DRIPS, _DRIP_S = 200, 0.01
_ERROR: dict[str, dict[str, Any]] = {
    "error": {"message": "the engine failed", "type": "InternalServerError", "param": None, "code": 500}
}
_ERROR_EVENT = b"data: " + json.dumps(_ERROR).encode() + b"\n\n"


async def well(wire: Wire) -> None:
    """Answer."""
    if wire.work.is_stream:
        wire.begin()
        await wire.generate()
        wire.last_events()
        wire.end()
    else:
        await wire.generate()
        wire.whole(wire.body())
        wire.is_answered = True


async def _half(wire: Wire) -> None:
    """Answer up to the middle: of the tokens of a stream, or of the bytes of a document."""
    if wire.work.is_stream:
        wire.begin()
        await wire.generate((wire.work.begins_at + wire.work.tokens) // 2)
    else:
        await wire.generate()
        body = wire.body()
        wire.send(wire.whole_head(body) + body[: len(body) // 2])
    await asyncio.sleep(0.02)  # a reset must not overtake what was sent


async def reset_request(wire: Wire) -> None:
    """Reset once the request was received."""
    wire.reset()


async def reset_head(wire: Wire) -> None:
    """Reset after the head."""
    if wire.work.is_stream:
        wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    else:
        await wire.generate()
        wire.send(wire.whole_head(wire.body()))
    await asyncio.sleep(0.02)
    wire.reset()


async def reset_middle(wire: Wire) -> None:
    """Reset in the middle of the answer, between two chunks."""
    await _half(wire)
    wire.reset()


async def reset_end(wire: Wire) -> None:
    """Reset before the last events of a stream, or the last byte of a document."""
    if wire.work.is_stream:
        wire.begin()
        await wire.generate()
    else:
        await wire.generate()
        body = wire.body()
        wire.send(wire.whole_head(body) + body[:-1])
    await asyncio.sleep(0.02)
    wire.reset()


async def half_chunk(wire: Wire) -> None:
    """Close in the middle of a chunk."""
    await _half(wire)
    if wire.work.is_stream:
        chunk = framed(wire.token())
        wire.send(chunk[: len(chunk) // 2])
    wire.close()


async def early_end(wire: Wire) -> None:
    """End the HTTP message by the book, but in the middle of the answer."""
    if wire.work.is_stream:
        await _half(wire)
        wire.send(b"0\r\n\r\n")
    else:
        await wire.generate()
        body = wire.body()
        wire.whole(body[: len(body) // 2])


async def garbage(wire: Wire) -> None:
    """Answer with something that is not HTTP."""
    wire.send(b"\x16\x03\x01 THIS IS NOT HTTP\r\n\r\n" * 20)
    wire.close()


async def garbage_body(wire: Wire) -> None:
    """Answer with a valid head, and something that is neither JSON nor events."""
    wire.whole(b"<html><body>It works!</body></html>", b"text/event-stream" if wire.work.is_stream else b"text/html")


async def status_500(wire: Wire) -> None:
    """Answer with 500."""
    wire.whole(json.dumps(_ERROR).encode(), status=500)


async def status_503(wire: Wire) -> None:
    """Answer with 503."""
    wire.whole(json.dumps(_ERROR).encode(), status=503)


async def error_event_first(wire: Wire) -> None:
    """Answer with 200 and a stream that begins with an error; to other requests with 500."""
    if not wire.work.is_stream:
        await status_500(wire)
        return
    wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    wire.event(_ERROR_EVENT)
    wire.event(b"data: [DONE]\n\n")
    wire.send(b"0\r\n\r\n")


async def error_event(wire: Wire) -> None:
    """Answer with a stream that has an error in its middle; to other requests with 500."""
    if not wire.work.is_stream:
        await status_500(wire)
        return
    await _half(wire)
    wire.event(_ERROR_EVENT)
    wire.event(b"data: [DONE]\n\n")
    wire.send(b"0\r\n\r\n")


async def abort(wire: Wire) -> None:
    """Answer half, and end it by the book, as vLLM does whose engine is paused or stopped: `finish_reason: abort`."""
    await _give_up(wire, "abort")


async def no_reason(wire: Wire) -> None:
    """Answer half, and end it by the book, without a reason."""
    await _give_up(wire, None)


async def _give_up(wire: Wire, reason: str | None) -> None:
    middle = (wire.work.begins_at + wire.work.tokens) // 2
    if not wire.work.is_stream:
        await wire.generate(middle)
        wire.whole(wire.body(reason))
        return
    wire.begin()
    await wire.generate(middle)
    if reason is not None:
        wire.finish(reason)
    wire.last_events()
    wire.send(b"0\r\n\r\n")


async def error_object(wire: Wire) -> None:
    """Answer 200 with an error, which has no code, in the place of the answer or in the middle of a stream."""
    error = {"error": {"message": "the engine failed", "type": "internal_error"}}
    if wire.work.is_stream:
        await _half(wire)
        wire.event(b"data: " + json.dumps(error).encode() + b"\n\n")
        wire.event(b"data: [DONE]\n\n")
        wire.send(b"0\r\n\r\n")
    else:
        wire.whole(json.dumps(error).encode())


async def status_429(wire: Wire) -> None:
    """Answer with 429, as a replica does that is full."""
    wire.whole(json.dumps({"error": _ERROR["error"] | {"code": 429}}).encode(), status=429)


async def stall(wire: Wire) -> None:
    """Answer nothing, as an engine does whose scheduler stands still; its health page still answers."""
    await asyncio.Event().wait()


async def other_model(wire: Wire) -> None:
    """Answer as an engine with another model does."""
    error = {"message": f"The model `{MODEL}` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
    wire.whole(json.dumps({"error": error}).encode(), status=404)


async def other_key(wire: Wire) -> None:
    """Answer as an engine with another key does."""
    wire.whole(b'{"error": "Unauthorized"}', status=401)


async def stall_middle(wire: Wire) -> None:
    """Stop in the middle of the answer."""
    await _half(wire)
    await asyncio.Event().wait()


async def slow_drip(wire: Wire) -> None:
    """Answer in pieces of a few bytes."""
    parts: list[bytes] = []
    wire.send_to(parts.append)
    await well(wire)
    wire.send_to(None)
    data = b"".join(parts)
    size = max(8, len(data) // _MOST_DRIPS)
    for begin in range(0, len(data), size):
        wire.send(data[begin : begin + size])
        await asyncio.sleep(_DRIP_S)


async def huge_lines(wire: Wire) -> None:
    """Answer with one line of some megabytes among the others."""
    padding = json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [], "padding": "x" * HUGE_BYTES})
    if wire.work.is_stream:
        wire.begin()
        await wire.generate((wire.work.begins_at + wire.work.tokens) // 2)
        wire.event(b"data: " + padding.encode() + b"\n\n")
        await wire.generate()
        wire.last_events()
        wire.end()
    else:
        await wire.generate()
        wire.whole(wire.body()[:-1] + b', "padding": "' + b"x" * HUGE_BYTES + b'"}')
        wire.is_answered = True


async def informational(wire: Wire) -> None:
    """Send answers of 1xx before the answer."""
    wire.send(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
    await well(wire)


async def trailers(wire: Wire) -> None:
    """End with trailers; a document too is framed in chunks."""
    if wire.work.is_stream:
        wire.begin(more=b"trailer: x-cost\r\n")
        await wire.generate()
        wire.last_events()
    else:
        await wire.generate()
        wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        wire.event(wire.body())
    wire.end(b"x-cost: 1\r\n")


async def http_1_0(wire: Wire) -> None:
    """Answer as an HTTP/1.0 server does: the end of the answer is that of the connection."""
    wire.is_chunked = False
    if wire.work.is_stream:
        wire.begin(b"HTTP/1.0")
        await wire.generate()
        wire.last_events()
    else:
        await wire.generate()
        wire.send(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + wire.body())
    wire.end()


async def http_1_0_cut(wire: Wire) -> None:
    """Answer half as an HTTP/1.0 server does: HTTP does not tell that it is cut."""
    wire.is_chunked = False
    if wire.work.is_stream:
        wire.begin(b"HTTP/1.0")
        await wire.generate((wire.work.begins_at + wire.work.tokens) // 2)
    else:
        await wire.generate()
        body = wire.body()
        wire.send(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + body[: len(body) // 2])
    wire.close()


REFUSALS = frozenset({"429", "503"})
"""Behaviours that run nothing."""
BEHAVIOURS: dict[str, Behaviour] = {
    "reset-request": reset_request,
    "reset-head": reset_head,
    "reset-middle": reset_middle,
    "reset-end": reset_end,
    "half-chunk": half_chunk,
    "early-end": early_end,
    "garbage": garbage,
    "garbage-body": garbage_body,
    "500": status_500,
    "503": status_503,
    "429": status_429,
    "abort": abort,
    "no-reason": no_reason,
    "error-object": error_object,
    "error-event-first": error_event_first,
    "error-event": error_event,
    "stall": stall,
    "stall-middle": stall_middle,
    STANDS_STILL: stall,
    ASLEEP: stall,
    OTHER_MODEL: other_model,
    OTHER_KEY: other_key,
    "slow-drip": slow_drip,
    "huge-lines": huge_lines,
    "informational": informational,
    "trailers": trailers,
    "http-1.0": http_1_0,
    "http-1.0-cut": http_1_0_cut,
}
"""By their names."""
