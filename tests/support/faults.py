"""Faults of scripted engines."""

from __future__ import annotations

from tests.support.upstream import Wire


async def reset_connection(wire: Wire) -> None:
    wire.reset()


async def answer_garbage(wire: Wire) -> None:
    await wire.send(b"HELLO THIS IS NOT HTTP\r\n\r\n")


async def answer_html(wire: Wire) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5\r\n\r\n<p>hi")


async def answer_broken_json(wire: Wire) -> None:
    await wire.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"id": "x')


async def hang(wire: Wire) -> None:
    await wire.until_closed()
