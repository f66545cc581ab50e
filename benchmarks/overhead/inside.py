"""Measure the CPU time of a request within the process: `python -m benchmarks.overhead.inside POOL...`.

A request goes through the frontend's protocol to the relay, and an answer back, over transports that write nothing. The
figure is the CPU time of one thread without sockets and kernel, the minimum of 24 rounds of 512 requests. It resolves
savings of half a microsecond, which `benchmarks.overhead` cannot. What waits for threads is dropped after each round.
Compiled if `gateway` is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, cast

import uvloop

from backends.health import Health, State
from backends.http.client import UpstreamClient, UpstreamConnection
from benchmarks.load import chat_body
from benchmarks.systems import environment
from gateway.config.load import load_pool
from gateway.config.settings import PoolSettings
from gateway.http.connection import ServerConnection
from gateway.http.server import HttpServer, ServerLimits
from gateway.relay.frontend import HttpFrontend
from gateway.rooms.recorder.room import RecorderRoom
from gateway.rooms.reports.room import ReportsRoom
from gateway.routing.keys import digest
from gateway.service.assembly import assemble
from gateway.service.replicas import plan

_REQUESTS = 512
_ROUNDS = 24
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nuser-agent: OpenAI/Python 1.99.0\r\n"
    b"accept: application/json\r\ncontent-type: application/json\r\nauthorization: Bearer sk-bench\r\n"
    b"x-stainless-lang: python\r\ncontent-length: %d\r\n\r\n%b"
)
_DOCUMENT = (
    b'{"id":"chatcmpl-0","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"%b"},"finish_reason":"stop"}],"usage":{"prompt_tokens":300,"total_tokens":440,'
    b'"completion_tokens":140}}' % (b"word " * 140)
)
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 18:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
    b"content-type: application/json\r\nx-request-id: %032x\r\n\r\n%b"
)


class NullTransport(asyncio.Transport):
    """A transport that only keeps the last data written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written: Any = b""

    def write(self, data: Any) -> None:
        self.written = data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class BackendTransport(NullTransport):
    """A transport to a backend, which records the connection that carries a request."""

    def __init__(self, connection: UpstreamConnection, carried: deque[UpstreamConnection]) -> None:
        super().__init__()
        self._connection = connection
        self._carried = carried

    def write(self, data: Any) -> None:
        self._carried.append(self._connection)


class Inside:
    """A gateway without sockets, each of whose backends has an idle connection.

    Attributes
    ----------
    carried
        Connections that carry a request, the oldest first.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self.gateway = assemble(settings, plan(settings, Path()).backends, digest("admin"))
        self.writes = self.gateway.relay.writes
        self.carried: deque[UpstreamConnection] = deque()
        self._server = HttpServer(HttpFrontend(self.gateway, _no_app, set()), ServerLimits(), self.writes)
        for model in self.gateway.models.values():
            for upstream in model.upstreams.values():
                upstream.backend.health = Health(State.UP)
                client = cast("UpstreamClient", upstream.client)
                connection = UpstreamConnection(client)
                connection.connection_made(BackendTransport(connection, self.carried))
                client.keep(connection)

    def client(self, transport: NullTransport) -> ServerConnection:
        """Return the connection of a client."""
        connection = ServerConnection(self._server)
        connection.connection_made(transport)
        return connection


async def _no_app(*_: object) -> None:
    raise AssertionError("all requests are relayed")


async def measure(pool: Path) -> float:
    """Return the microseconds per request on the event loop."""
    inside, client = Inside(load_pool(pool)), NullTransport()
    frontend = inside.client(client)
    queues: list[deque[Any]] = []
    for room in inside.gateway.rooms:
        if isinstance(room, RecorderRoom) and room.recorder is not None:
            queues.append(room.recorder._queue)
        if isinstance(room, ReportsRoom):
            queues += [outlet._queue for outlet in room.outlets]
    bodies = [chat_body(2000, number, stream=False) for number in range(_REQUESTS)]
    requests = [_HEAD % (len(body), body) for body in bodies]
    answers = [_ANSWER % (len(_DOCUMENT), number, _DOCUMENT) for number in range(_REQUESTS)]
    taken_s = []
    for _ in range(_ROUNDS):
        begun_s = time.thread_time()
        for request, answer in zip(requests, answers, strict=True):
            frontend.data_received(request)
            inside.writes.flush()  # as at the end of a loop iteration
            inside.carried.pop().data_received(answer)
            inside.writes.flush()
        taken_s.append(time.thread_time() - begun_s)
        for queue in queues:
            queue.clear()  # a full one would make the next requests cheaper
        await asyncio.sleep(0)
    assert bytes(client.written).startswith(b"HTTP/1.1 200 OK\r\n"), client.written
    return 1e6 * min(taken_s) / _REQUESTS


def main() -> None:
    """Measure and print each pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pools", nargs="+", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="inside-") as folder:
        os.environ.update(environment(1, Path(folder)))
        for pool in arguments.pools:
            print(f"{pool.stem}: {uvloop.run(measure(pool)):.1f} us per request in the process", flush=True)


if __name__ == "__main__":
    main()
