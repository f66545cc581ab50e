"""The load generator: connections that send one request after another, and requests that are sent at a rate.

Run as `python -m benchmarks.load OPTIONS`, the parameters of `run` in JSON, it sends chats that all differ, and prints
one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import cycle
from typing import cast

import httptools
import numpy as np
import uvloop

_SENT = b'"content":" '
_BODIES = 61
_HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nuser-agent: OpenAI/Python 1.99.0\r\n"
    "accept: application/json\r\ncontent-type: application/json\r\nx-stainless-lang: python\r\n"
    "{headers}content-length: {length}\r\n\r\n"
)


class Call:
    """A request, and what comes of it."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.sent_s = 0.0

    def on_body(self, data: bytes) -> None:
        """Take a piece of the answer."""

    def on_end(self, status: int) -> None:
        """Take the end of the answer, with its status."""


class Connection(asyncio.Protocol):
    """A connection that sends calls until there are no more, each once the one before is answered.

    Attributes
    ----------
    ended
        Done when there are no more; an error if the connection is lost before.
    """

    def __init__(self, calls: Iterator[Call]) -> None:
        self._calls = calls
        self._call: Call | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        self._call = next(self._calls, None)
        if self._call is None:
            self.close()
            return
        self._call.sent_s = time.monotonic()
        self._transport.write(self._call.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        assert self._call is not None
        self._call.on_body(body)

    def on_message_complete(self) -> None:
        assert self._call is not None
        self._call.on_end(self._parser.get_status_code())
        self._next()

    def close(self) -> None:
        """Close at once."""
        if not self.ended.done():
            self.ended.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the connection was closed"))


async def closed_loop(port: int, calls: Iterator[Call], connections: int, spread_s: float = 0.0) -> list[Connection]:
    """Open connections, over `spread_s`, that take the calls in turn."""
    loop, opened = asyncio.get_running_loop(), []
    for _ in range(connections):
        _, connection = await loop.create_connection(lambda: Connection(calls), "127.0.0.1", port)
        opened.append(connection)
        if spread_s:
            await asyncio.sleep(spread_s / connections)
    return opened


async def steady(rate_per_s: float) -> AsyncIterator[float]:
    """Yield at a rate, with the seconds by which it is late; what is late by more than one second is left out."""
    next_s = time.monotonic()
    while True:
        yield time.monotonic() - next_s
        next_s = max(next_s + 1.0 / rate_per_s, time.monotonic() - 1.0)
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))


def chat_body(size: int, number: int, *, stream: bool) -> bytes:
    """Return the `number`th chat request of about `size` bytes: eight words per line, all lines different."""
    words = " ".join(
        f"word{(index + 31 * number) * 7919 % 9973}{'' if index % 8 else chr(10)}" for index in range(size // 8)
    )
    document = {
        "model": "m",
        "messages": [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": words}],
        "max_tokens": 128,
        "temperature": 0.7,
        "stream": stream,
    }
    return json.dumps(document).encode()


class Totals:
    """Results of all chats."""

    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self.ttfts_s: list[float] = []
        self.chunk_delays_s: list[float] = []
        self.errors = 0


class Chat(Call):
    """A chat; the chunks of its answer say when they were sent."""

    def __init__(self, request: bytes, totals: Totals) -> None:
        super().__init__(request)
        self._totals = totals
        self._has_begun = False

    def on_body(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._totals.ttfts_s.append(time.monotonic() - self.sent_s)
        start = data.find(_SENT)
        if start >= 0:
            sent_s = float(data[start + len(_SENT) : start + len(_SENT) + 17])
            self._totals.chunk_delays_s.append(time.monotonic() - sent_s)

    def on_end(self, status: int) -> None:
        self._totals.errors += status != 200
        self._totals.latencies_s.append(time.monotonic() - self.sent_s)


def _quantiles_ms(values_s: list[float]) -> dict[str, float]:
    if not values_s:
        return {}
    p50, p99 = np.quantile(values_s, [0.5, 0.99]) * 1e3
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


async def run(
    port: int,
    connections: int,
    seconds: float,
    body_bytes: int,
    *,
    stream: bool = False,
    headers: Sequence[str] = (),
    spread_s: float = 0.0,
    seed: int = 0,
) -> dict[str, object]:
    """Run the load and return its results.

    Parameters
    ----------
    spread_s
        Seconds over which connections are opened.
    seed
        Other bodies for each.
    """
    lines, totals = "".join(f"{header}\r\n" for header in headers), Totals()
    numbers = range(_BODIES * seed, _BODIES * (seed + 1))
    bodies = [chat_body(body_bytes, number, stream=stream) for number in numbers]
    requests = cycle(_HEAD.format(headers=lines, length=len(body)).encode() + body for body in bodies)
    opened = await closed_loop(port, (Chat(each, totals) for each in requests), connections, spread_s)
    before = len(totals.latencies_s)
    await asyncio.sleep(seconds)
    done = len(totals.latencies_s) - before
    lost = sum(each.ended.done() and each.ended.exception() is not None for each in opened)
    for connection in opened:
        connection.close()
    return {
        "requests_per_s": round(done / seconds, 1),
        "requests": done,
        "errors": totals.errors + lost,
        "latency_ms": _quantiles_ms(totals.latencies_s),
        "ttft_ms": _quantiles_ms(totals.ttfts_s),
        "chunk_delay_ms": _quantiles_ms(totals.chunk_delays_s),
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(**json.loads(sys.argv[1])))))
