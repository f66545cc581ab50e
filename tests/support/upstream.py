"""A scripted HTTP server that answers like vLLM, or fails in a given way.

It is for failures that real engines do not show on demand; all else is tested against the simulator and vLLM itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from tests.support.event_loop import event_loop_in_thread, stop_listening


@dataclass
class Seen:
    """A request as received."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Wire:
    """The connection to the gateway on which a behaviour answers a request."""

    upstream: Upstream
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    seen: Seen

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, document: Any, status: int = 200, headers: str = "") -> None:
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        await self.send(head.encode() + body)

    async def begin_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def stream(self, *events: bytes, pause_s: float = 0.0) -> None:
        """Answer with a stream of these events, with a pause between them."""
        await self.begin_stream()
        for number, event in enumerate(events):
            if number and pause_s:
                await asyncio.sleep(pause_s)
            await self.chunk(event)
        await self.end_stream()

    async def until_closed(self) -> None:
        """Wait until the gateway closes the connection, and count that."""
        with contextlib.suppress(ConnectionError):  # a reset, if the gateway had not read everything
            await self.reader.read(1)
        self.upstream.aborted += 1

    async def json_event(self, document: Any) -> None:
        """Answer with a stream of one event, and its end."""
        await self.stream(b"data: " + json.dumps(document).encode() + b"\n\ndata: [DONE]\n\n")

    def reset(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Wire], Awaitable[None]]


def delta(text: str) -> bytes:
    document = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counted = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    document = {"id": "x", "choices": [], "usage": counted | {"total_tokens": sum(counted.values())}}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


END = (
    b'data: {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, '
    b'"finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
)
"""The last events of a stream that is whole."""


def answer(name: str, tokens: int = 3) -> dict[str, Any]:
    """Return an answer in every API."""
    return {
        "id": "x",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": f"from {name}"}, "finish_reason": "stop"}],
        "content": [],
        "stop_reason": "end_turn",
        "output": [],
        "data": [{}],
        "usage": {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens},
    }


async def well(wire: Wire) -> None:
    """Answer at once, with a stream of three chunks if the request asks for a stream."""
    if wire.seen.body and wire.seen.json.get("stream"):
        await wire.stream(delta("from "), delta(wire.upstream.name), delta("!"), END)
    else:
        await wire.json(answer(wire.upstream.name))


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


async def endless(wire: Wire) -> None:
    """Begin a stream, and wait until it is closed."""
    await wire.begin_stream()
    await wire.chunk(delta("one"))
    await wire.until_closed()


def answering(document: Any, status: int = 200, headers: str = "") -> Behaviour:
    """Return what answers with a document."""
    return lambda wire: wire.json(document, status, headers)


@dataclass
class Upstream:
    """A scripted server.

    Parameters
    ----------
    behaviour
        Answers requests, except those for `/health`, `/v1/models` and `/metrics`.
    models, metrics, metrics_behaviour
        Raw answer of `/v1/models` (None for a valid one), and the page of `/metrics`, or what answers it instead.
    version
        What `/version` says; None has `behaviour` answer it.
    is_paused
        What `/is_paused` says; None has it answer 404, as outside of vLLM's development mode.

    Attributes
    ----------
    seen
        The requests that `behaviour` has received.
    aborted
        Number of connections that the gateway closed during `Wire.until_closed`.
    connections
        Number of connections accepted.
    """

    name: str
    model: str
    behaviour: Behaviour = well
    health_status: int = 200
    health_hangs: bool = False
    models: bytes | None = None
    metrics: bytes = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
    metrics_behaviour: Behaviour | None = None
    version: str | None = "0.32.0"
    is_paused: bool | None = None
    max_model_len: int = 2048
    root: str = ""  # the weights that it says it has loaded
    close_after_answer: bool = False
    seen: list[Seen] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)  # which it has loaded
    aborted: int = 0
    connections: int = 0
    url: str = ""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        await self.listen(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def die(self) -> None:
        """Stop listening and abort all connections."""
        if self._server is not None:
            await stop_listening(self._server)
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def come_back(self) -> None:
        await self.listen(int(self.url.rpartition(":")[2]))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = [(line.partition(": ")[0], line.partition(": ")[2]) for line in head[1:] if line]
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        is_chunked = any(name.lower() == "transfer-encoding" for name, _ in headers)
        body = await _read_chunks(reader) if is_chunked else await reader.readexactly(length)
        seen = Seen(method, target, headers, body)
        wire = Wire(self, writer, reader, seen)
        if target == "/health":
            if self.health_hangs:
                await asyncio.sleep(3600)
            await wire.json({}, self.health_status)
        elif target == "/v1/models":
            if self.models is not None:
                await wire.send(self.models)
                return False
            adapters = [{"id": name, "object": "model", "parent": self.model} for name in self.adapters]
            own = {"id": self.model, "object": "model", "root": self.root, "max_model_len": self.max_model_len}
            await wire.json({"object": "list", "data": [own, *adapters]})
        elif (method, target) == ("GET", "/version") and self.version is not None:
            await wire.json({"version": self.version})
        elif target == "/is_paused":
            await wire.json({"is_paused": self.is_paused}, 404 if self.is_paused is None else 200)
        elif target == "/metrics" and self.metrics_behaviour is not None:
            await self.metrics_behaviour(wire)
            return False
        elif target == "/metrics":
            await wire.send(b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n" % len(self.metrics) + self.metrics)
        else:
            self.seen.append(seen)
            await self.behaviour(wire)
            if self.close_after_answer:
                return False
        return not writer.transport.is_closing()


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return body


@contextlib.contextmanager
def upstreams_in_thread(names: Iterable[str], model: str, behaviour: Behaviour = well) -> Iterator[list[Upstream]]:
    """Run upstreams on an event loop of their own."""
    with event_loop_in_thread() as run:
        upstreams = [Upstream(name, model, behaviour) for name in names]
        try:
            for upstream in upstreams:
                run(upstream.listen(0))
            yield upstreams
        finally:
            for upstream in upstreams:
                run(upstream.die())
