"""The ways in which a replica answers, most of them wrong: how much of an answer it sends, and how that ends."""

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
_ON_THE_WAY_S = 0.02
"""A reset must not overtake what was sent."""


def _error(code: int, **more: Any) -> dict[str, Any]:
    known = {"message": "the engine failed", "type": "InternalServerError", "param": None, "code": code}
    return {"error": known | more}


async def well(wire: Wire) -> None:
    """Answer."""
    if wire.work.is_stream:
        wire.begin()
        await wire.generate()
        wire.last_events()
        wire.end()
    else:
        wire.whole(await wire.document())
        wire.is_answered = True


async def _nothing(wire: Wire) -> None:
    """Send nothing."""


async def _head(wire: Wire) -> None:
    """Send the head."""
    if wire.work.is_stream:
        wire.stream_head()
    else:
        wire.send(wire.whole_head(await wire.document()))


async def _half(wire: Wire) -> None:
    """Send half of the tokens of a stream, or of the bytes of a document."""
    if wire.work.is_stream:
        wire.begin()
        await wire.generate(wire.work.middle)
    else:
        body = await wire.document()
        wire.send(wire.whole_head(body) + body[: len(body) // 2])


async def _nearly_all(wire: Wire) -> None:
    """Send all but the last events of a stream, or the last byte of a document."""
    if wire.work.is_stream:
        wire.begin()
    await wire.generate()
    if not wire.work.is_stream:
        wire.send((wire.whole_head(wire.body()) + wire.body())[:-1])


def _reset_after(part: Behaviour) -> Behaviour:
    async def behave(wire: Wire) -> None:
        await part(wire)
        if part is not _nothing:
            await asyncio.sleep(_ON_THE_WAY_S)
        wire.reset()

    return behave


def _silent_after(part: Behaviour) -> Behaviour:
    async def behave(wire: Wire) -> None:
        await part(wire)
        await asyncio.Event().wait()

    return behave


async def _half_chunk(wire: Wire) -> None:
    """Close in the middle of a chunk."""
    await _half(wire)
    await asyncio.sleep(_ON_THE_WAY_S)
    if wire.work.is_stream:
        chunk = framed(wire.token())
        wire.send(chunk[: len(chunk) // 2])
    wire.close()


async def _early_end(wire: Wire) -> None:
    """End the HTTP message by the book, but in the middle of the answer."""
    if wire.work.is_stream:
        await _half(wire)
        wire.send(b"0\r\n\r\n")
    else:
        body = await wire.document()
        wire.whole(body[: len(body) // 2])


async def _garbage(wire: Wire) -> None:
    wire.send(b"\x16\x03\x01 THIS IS NOT HTTP\r\n\r\n" * 20)
    wire.close()


async def _garbage_body(wire: Wire) -> None:
    """Answer with a valid head, and something that is neither JSON nor events."""
    wire.whole(b"<html><body>It works!</body></html>", b"text/event-stream" if wire.work.is_stream else b"text/html")


def _status(code: int, document: dict[str, Any] | None = None) -> Behaviour:
    async def behave(wire: Wire) -> None:
        wire.whole(json.dumps(document or _error(code)).encode(), status=code)

    return behave


def _error_event_after(part: Behaviour, error: dict[str, Any], otherwise: int) -> Behaviour:
    """Return what has an error in a stream; to other requests it answers with a status and the error."""

    async def behave(wire: Wire) -> None:
        if not wire.work.is_stream:
            await _status(otherwise, error)(wire)
            return
        await part(wire)
        wire.event(b"data: " + json.dumps(error).encode() + b"\n\n")
        wire.event(b"data: [DONE]\n\n")
        wire.send(b"0\r\n\r\n")

    return behave


def _given_up(reason: str | None) -> Behaviour:
    """Return what answers half, and ends it by the book, as vLLM does whose engine is paused or stopped."""

    async def behave(wire: Wire) -> None:
        if not wire.work.is_stream:
            await wire.generate(wire.work.middle)
            wire.whole(wire.body(reason))
            return
        await _half(wire)
        if reason is not None:
            wire.finish(reason)
        wire.last_events()
        wire.send(b"0\r\n\r\n")

    return behave


async def _slow_drip(wire: Wire) -> None:
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


async def _huge_lines(wire: Wire) -> None:
    """Answer with one line of some megabytes among the others."""
    padding = json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [], "padding": "x" * HUGE_BYTES})
    if wire.work.is_stream:
        await _half(wire)
        wire.event(b"data: " + padding.encode() + b"\n\n")
        await wire.generate()
        wire.last_events()
        wire.end()
    else:
        wire.whole((await wire.document())[:-1] + b', "padding": "' + b"x" * HUGE_BYTES + b'"}')
        wire.is_answered = True


async def _informational(wire: Wire) -> None:
    """Send answers of 1xx before the answer."""
    wire.send(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
    await well(wire)


async def _trailers(wire: Wire) -> None:
    """End with trailers; a document too is framed in chunks."""
    if wire.work.is_stream:
        wire.begin(more=b"trailer: x-cost\r\n")
        await wire.generate()
        wire.last_events()
    else:
        body = await wire.document()
        wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        wire.event(body)
    wire.end(b"x-cost: 1\r\n")


def _http_1_0(*, is_cut: bool) -> Behaviour:
    """Return what answers as an HTTP/1.0 server does: the end of the answer, or of half of it, is the connection's."""

    async def behave(wire: Wire) -> None:
        wire.is_chunked = False
        if wire.work.is_stream:
            wire.begin(b"HTTP/1.0")
            await wire.generate(wire.work.middle if is_cut else None)
            if not is_cut:
                wire.last_events()
        else:
            body = await wire.document()
            half = body[: len(body) // 2]
            wire.send(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + (half if is_cut else body))
        wire.end()
        wire.is_answered = not is_cut

    return behave


_NO_MODEL = {"message": f"The model `{MODEL}` does not exist.", "type": "NotFoundError", "param": "model"}
_WITHOUT_CODE = {"error": {"message": "the engine failed", "type": "internal_error"}}
REFUSALS = frozenset({"429", "503"})
"""Behaviours that run nothing."""
BEHAVIOURS: dict[str, Behaviour] = {
    "reset-request": _reset_after(_nothing),
    "reset-head": _reset_after(_head),
    "reset-middle": _reset_after(_half),
    "reset-end": _reset_after(_nearly_all),
    "half-chunk": _half_chunk,
    "early-end": _early_end,
    "garbage": _garbage,
    "garbage-body": _garbage_body,
    "500": _status(500),
    "503": _status(503),
    "429": _status(429),
    "abort": _given_up("abort"),
    "no-reason": _given_up(None),
    "error-object": _error_event_after(_half, _WITHOUT_CODE, 200),
    "error-event-first": _error_event_after(_head, _error(500), 500),
    "error-event": _error_event_after(_half, _error(500), 500),
    "stall": _silent_after(_nothing),  # as an engine whose scheduler stands still; its health page still answers
    "stall-middle": _silent_after(_half),
    STANDS_STILL: _silent_after(_nothing),
    ASLEEP: _silent_after(_nothing),
    OTHER_MODEL: _status(404, _error(404, **_NO_MODEL)),
    OTHER_KEY: _status(401, {"error": "Unauthorized"}),
    "slow-drip": _slow_drip,
    "huge-lines": _huge_lines,
    "informational": _informational,
    "trailers": _trailers,
    "http-1.0": _http_1_0(is_cut=False),
    "http-1.0-cut": _http_1_0(is_cut=True),
}
"""By their names."""
