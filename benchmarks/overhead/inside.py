"""Measure the CPU time of a request within the process: `python -m benchmarks.overhead.inside POOL...`.

A request goes through the frontend's protocol to the relay, and an answer back, over transports that write nothing. The
figure is the CPU time of one thread without sockets and kernel, the minimum of 24 rounds of 512 requests. It resolves
savings of half a microsecond, which `benchmarks.overhead` cannot. `--unlike` adds a number to the head of each request
and answer, so that no head equals the one before. `--recorded` runs the recorder's thread, turns shadow drafting off,
and also prints the CPU time of all threads; the queue is emptied after each round. `--telemetry JSON` sets the section
`telemetry` of the pool file, and runs its threads with `--recorded` too; `{"otlp": {}}` has a collector in another
process. Compiled if `gateway` is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, cast

import uvloop

from backends.health import Health, State
from backends.http.client import Connection, UpstreamClient
from backends.launch.ports import free_port
from benchmarks import process
from benchmarks.load import chat_body
from benchmarks.systems import environment
from gateway.config.load import load_pool
from gateway.config.settings import PoolSettings, TelemetrySettings
from gateway.http.connection import ServerConnection
from gateway.http.server import HttpServer, ServerLimits
from gateway.relay.frontend import HttpFrontend
from gateway.rooms.recorder.recorder import Recorder
from gateway.rooms.recorder.room import RecorderRoom
from gateway.rooms.reports.room import Outlet, ReportsRoom
from gateway.routing.keys import digest
from gateway.service.assembly import assemble
from gateway.service.replicas import plan

_REQUESTS = 512
_ROUNDS = 24
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nuser-agent: OpenAI/Python 1.99.0\r\n"
    b"accept: application/json\r\ncontent-type: application/json\r\nauthorization: Bearer sk-bench\r\n"
    b"x-stainless-lang: python\r\n%bcontent-length: %d\r\n\r\n%b"
)
_ANSWER_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
_ANSWER = (
    b'{"id":"chatcmpl-0","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"%b"},"finish_reason":"stop"}],"usage":{"prompt_tokens":300,"total_tokens":440,'
    b'"completion_tokens":140}}' % (b"word " * 140)
)


class NullTransport(asyncio.Transport):
    """A transport that only keeps the last data written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written: Any = b""

    def write(self, data: Any) -> None:
        self.written = data

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class BackendTransport(NullTransport):
    """A transport to a backend, which records the connection that carries a request."""

    def __init__(self, connection: Connection, carried: deque[Connection]) -> None:
        super().__init__()
        self._connection = connection
        self._carried = carried

    def write(self, data: Any) -> None:
        self._carried.append(self._connection)


class Inside:
    """A gateway without sockets, each of whose backends has some idle connections.

    Attributes
    ----------
    carried
        Connections that carry a request, the oldest first.
    """

    def __init__(self, settings: PoolSettings, idle: int) -> None:
        self.gateway = assemble(settings, plan(settings, Path()).backends, digest("admin"))
        self.writes = self.gateway.relay.writes
        self.carried: deque[Connection] = deque()
        self._server = HttpServer(HttpFrontend(self.gateway, _no_app, set()), ServerLimits(), writes=self.writes)
        for model in self.gateway.models.values():
            for upstream in model.upstreams.values():
                upstream.backend.health = Health(State.UP)
                client = cast("UpstreamClient", upstream.client)
                for _ in range(idle):
                    connection = Connection(client)
                    connection.connection_made(BackendTransport(connection, self.carried))
                    client.keep(connection)

    def client(self, transport: NullTransport) -> ServerConnection:
        """Return the connection of a client."""
        connection = ServerConnection(self._server)
        connection.connection_made(transport)
        return connection


async def _no_app(*_: object) -> None:
    raise AssertionError("all requests are relayed")


def request_of(body: bytes, more: bytes = b"") -> bytes:
    """Return a request with more header lines."""
    return _HEAD % (more, len(body), body)


def answer_of(more: bytes = b"") -> bytes:
    """Return an answer with more header lines."""
    return _ANSWER_HEAD % (more, len(_ANSWER), _ANSWER)


async def measure(pool: Path, telemetry: dict[str, Any], *, unlike: bool, recorded: bool) -> tuple[float, float]:
    """Return the microseconds per request, on the event loop and in all threads."""
    settings = load_pool(pool)
    settings = settings.model_copy(update={"telemetry": TelemetrySettings.model_validate(telemetry)})
    inside, client = Inside(settings, 1), NullTransport()
    frontend, rooms, relay = inside.client(client), inside.gateway.rooms, inside.gateway.relay
    recorder = next((room.recorder for room in rooms if isinstance(room, RecorderRoom)), None)
    outlets = [each for room in rooms if isinstance(room, ReportsRoom) for each in room.outlets]
    started = [each for each in (*outlets, recorder) if each is not None] if recorded else []
    for each in started:
        each.start()
    if recorded:
        relay.followers = dict.fromkeys(relay.followers, [recorder] if recorder is not None else [])
    extra = [b"x-number: %d\r\n" % number if unlike else b"" for number in range(_REQUESTS)]
    requests = [request_of(chat_body(2000, number, stream=False), more) for number, more in enumerate(extra)]
    answers = [answer_of(more) for more in extra]
    taken_s, process_s = [], []
    for _ in range(_ROUNDS):
        begun_s, process_begun_s = time.thread_time(), time.process_time()
        for request, answer in zip(requests, answers, strict=True):
            frontend.data_received(request)
            inside.writes.flush()  # as at the end of a loop iteration
            inside.carried.pop().data_received(answer)
            inside.writes.flush()
        taken_s.append(time.thread_time() - begun_s)
        _empty(recorder, outlets, recorded=recorded)
        process_s.append(time.process_time() - process_begun_s)
        await asyncio.sleep(0)
    for each in started:
        each.stop()
    assert bytes(client.written).startswith(b"HTTP/1.1 200 OK\r\n"), client.written
    return 1e6 * min(taken_s) / _REQUESTS, 1e6 * min(process_s) / _REQUESTS


def _empty(recorder: Recorder | None, outlets: list[Outlet], *, recorded: bool) -> None:
    """Wait until threads have taken what waits for them; drop it if they do not run."""
    queues: list[deque[Any]] = [outlet._queue for outlet in outlets]
    if recorder is not None:
        queues.append(recorder._queue)
    while any(queues):
        if not recorded:
            for queue in queues:
                queue.clear()  # a full queue would make the next requests cheaper
        time.sleep(0.001)


def main() -> None:
    """Measure and print each pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pools", nargs="+", type=Path)
    parser.add_argument("--unlike", action="store_true")
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--telemetry", type=json.loads, default={}, help="as in the pool file, in JSON")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inside-")))
        if "otlp" in arguments.telemetry:
            port = free_port()
            stack.enter_context(process.upstream(port, folder, {}))  # which takes whatever it is sent
            arguments.telemetry["otlp"].setdefault("endpoint", f"http://127.0.0.1:{port}")
        os.environ.update(environment(1, folder))
        for pool in arguments.pools:
            measured = measure(pool, arguments.telemetry, unlike=arguments.unlike, recorded=arguments.recorded)
            taken_us, process_us = uvloop.run(measured)
            all_threads = f", {process_us:.1f} in all threads" if arguments.recorded else ""
            print(f"{pool.stem}: {taken_us:.1f} us per request in the process{all_threads}", flush=True)


if __name__ == "__main__":
    main()
