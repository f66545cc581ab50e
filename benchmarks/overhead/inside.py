"""Measure the CPU time of a request within the process: `python -m benchmarks.overhead.inside POOL...`.

A request goes through the frontend's protocol to the relay, and an answer back, over transports that write nothing. The
figure is the CPU time of one thread without sockets and kernel, the minimum of 24 rounds of 512 requests. It resolves
savings of half a microsecond, which `benchmarks.overhead` cannot. `--unlike` adds a number to the head of each request
and answer, so that no head equals the one before. `--stream` has the answers streamed, as by vLLM: each of 64 events is
read by itself. `--recorded` runs the recorder's thread, turns shadow drafting off,
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
from itertools import product
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
from gateway.config.settings import TelemetrySettings
from gateway.http.connection import ServerConnection
from gateway.http.server import HttpServer, ServerLimits
from gateway.relay.frontend import HttpFrontend
from gateway.rooms.recorder.recorder import Recorder
from gateway.rooms.recorder.room import RecorderRoom
from gateway.rooms.reports.outlet import Outlet
from gateway.rooms.reports.room import ReportsRoom
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
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%btransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1795220527,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":" word"},"logprobs":null,"finish_reason":%b,"token_ids":%b}]}\n\n'
)
_USAGE_EVENT = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1795220527,"model":"m","choices":[],'
    b'"usage":{"prompt_tokens":300,"total_tokens":364,"completion_tokens":64}}\n\n'
)
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

    def __init__(self, connection: Connection, carried: list[Connection]) -> None:
        super().__init__()
        self._connection = connection
        self._carried = carried

    def write(self, data: Any) -> None:
        self.written = data
        self._carried.append(self._connection)


async def _no_app(*_: object) -> None:
    raise AssertionError("all requests are relayed")


def _numbered(number: int, *, unlike: bool) -> bytes:
    return b"x-number: %d\r\n" % number if unlike else b""


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _reads_of_stream(with_ids: bool, with_usage: bool) -> list[bytes]:
    """Return what is read of a stream after its head, piece by piece."""
    ids, prompt_ids = (b"[737]", b"[%b7]" % (b"1234," * 300)) if with_ids else (b"null", b"null")
    first = _EVENT.replace(b'"choices"', b'"prompt_token_ids":%b,"choices"') % (prompt_ids, b"null", b"null")
    events = [first, *[_EVENT % (b"null", ids)] * 62, _EVENT % (b'"length"', ids), *[_USAGE_EVENT] * with_usage]
    return [*map(_framed, [*events, b"data: [DONE]\n\n"]), b"0\r\n\r\n"]


async def measure(
    pool: Path,
    body_bytes: int,
    telemetry: dict[str, Any],
    *,
    unlike: bool,
    recorded: bool = False,
    stream: bool = False,
) -> tuple[float, float]:
    """Return the microseconds per request, on the event loop and in all threads."""
    settings = load_pool(pool)
    settings = settings.model_copy(update={"telemetry": TelemetrySettings.model_validate(telemetry)})
    gateway = assemble(settings, plan(settings, Path()).backends, digest("admin"))
    for backend in gateway.pool:
        backend.health = Health(State.UP)
    service = HttpFrontend(gateway, _no_app, set())
    server = HttpServer(service, ServerLimits(), writes=gateway.relay.writes)
    frontend, client, carried = ServerConnection(server), NullTransport(), list[Connection]()
    frontend.connection_made(client)
    for model in gateway.models.values():
        for upstream in model.upstreams.values():
            client_of_backend = cast("UpstreamClient", upstream.client)
            connection = Connection(client_of_backend)
            connection.connection_made(BackendTransport(connection, carried))
            client_of_backend.keep(connection)
    writes = gateway.relay.writes
    recorder = next((room.recorder for room in gateway.rooms if isinstance(room, RecorderRoom)), None)
    outlets = [each for room in gateway.rooms if isinstance(room, ReportsRoom) for each in room.outlets]
    for each in (*outlets, recorder) if recorded else ():
        if each is not None:
            each.start()
    if recorded:
        gateway.relay.followers = dict.fromkeys(gateway.relay.followers, [recorder] if recorder is not None else [])
    requests, answers = [], []
    for number in range(_REQUESTS):
        body, extra = chat_body(body_bytes, number, stream=stream), _numbered(number, unlike=unlike)
        requests.append(_HEAD % (extra, len(body), body))
        answers.append(_STREAM_HEAD % extra if stream else _ANSWER_HEAD % (extra, len(_ANSWER), _ANSWER))
    rest = {kind: _reads_of_stream(*kind) for kind in product((False, True), repeat=2)}
    taken_s, process_s = [], []
    for _ in range(_ROUNDS):
        begun_s, process_begun_s = time.thread_time(), time.process_time()
        for request, answer in zip(requests, answers, strict=True):
            frontend.data_received(request)
            writes.flush()  # as at the end of a loop iteration
            connection = carried.pop()
            sent = cast("BackendTransport", connection._transport).written
            connection.data_received(answer)
            for read in rest[b"return_token_ids" in sent, b"include_usage" in sent] if stream else ():
                connection.data_received(read)
            writes.flush()
        taken_s.append(time.thread_time() - begun_s)
        _empty(recorder, outlets, recorded=recorded)
        process_s.append(time.process_time() - process_begun_s)
        await asyncio.sleep(0)
    for each in (*outlets, recorder) if recorded else ():
        if each is not None:
            each.stop()
    assert bytes(client.written).startswith(b"0\r\n\r\n" if stream else b"HTTP/1.1 200 OK\r\n"), client.written
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
    parser.add_argument("--body-bytes", type=int, default=2000)
    parser.add_argument("--unlike", action="store_true")
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--telemetry", type=json.loads, default={}, help="as in the pool file, in JSON")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if "otlp" in arguments.telemetry:
            port, folder = free_port(), stack.enter_context(tempfile.TemporaryDirectory(prefix="inside-"))
            stack.enter_context(process.upstream(port, Path(folder), {}))  # which takes whatever it is sent
            arguments.telemetry["otlp"].setdefault("endpoint", f"http://127.0.0.1:{port}")
        _print(arguments)


def _print(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="inside-") as folder:
        os.environ.update(environment(1, Path(folder)))
        for pool in arguments.pools:
            measured = measure(
                pool,
                arguments.body_bytes,
                arguments.telemetry,
                unlike=arguments.unlike,
                recorded=arguments.recorded,
                stream=arguments.stream,
            )
            taken_us, process_us = uvloop.run(measured)
            all_threads = f", {process_us:.1f} in all threads" if arguments.recorded else ""
            print(f"{pool.stem}: {taken_us:.1f} us per request in the process{all_threads}", flush=True)


if __name__ == "__main__":
    main()
