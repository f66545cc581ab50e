"""What holds for every proxy in front of the gateway: checks that share one proxy, which takes a while to start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived

from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.upstream import END, Wire, delta, endless, well
from tests.support.waiting import eventually, eventually_async

PAUSE_S = 1.5
"""A pause in a stream, longer than all time-outs that a proxy is given for the tests, except the one that is for it."""

PROMPT_S = 10.0
"""How long a chunk may take to the client, and its leaving to the engine: less than the gateway's own time-out."""

SETTINGS: dict[str, Any] = {
    "timeouts": {"connect_s": 1.0, "first_byte_s": 30.0, "idle_s": 30.0},
    "server": {"drain_s": 2.0, "max_body_mib": 1.0, "max_unfinished_mib": 4.0},
}
HIDDEN = (
    "/metrics",
    "/admin",
    "/admin/pool",
    "/dashboard",
    "/docs",
    "/v1/../metrics",
    "/v1/%2e%2e/metrics",
    "//metrics",
)


class StartProxy(Protocol):
    """Starts a proxy with its configuration of deploy/, for a gateway at a port; yields its address."""

    def __call__(self, gateway_port: int, folder: Path) -> AbstractAsyncContextManager[str]: ...


@dataclass
class Front:
    """A gateway, and a client that reaches it through the proxy only."""

    running: Running
    client: httpx.AsyncClient

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        return await self.client.post("/v1/chat/completions", json=_body(text, fields), headers=headers)

    def stream(self, text: str = "hi") -> AbstractAsyncContextManager[httpx.Response]:
        return self.client.stream("POST", "/v1/chat/completions", json=_body(text, {"stream": True}))


def _body(text: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


@contextlib.asynccontextmanager
async def proxy_process(*argv: str | Path, url: str, log: Path) -> AsyncIterator[str]:
    """Run a proxy until it answers at `url`."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *map(str, argv), stdout=output, stderr=output, start_new_session=True
        )
    try:

        async def answers() -> bool:
            assert process.returncode is None, log.read_text()  # noqa: ASYNC240
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.close()
                return True
            return False

        await eventually_async(answers, what=f"{argv[0]} to answer")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def check_front(start_proxy: StartProxy, folder: Path) -> None:
    """Check all that is promised of a proxy with its configuration of deploy/."""
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(start_gateway({"a": "baseline"}, **SETTINGS))
        port = int(running.url.rpartition(":")[2])
        async with start_proxy(port, folder) as url:
            verify = ssl.create_default_context(cafile=folder / "gateway.crt")
            async with httpx.AsyncClient(
                base_url=url, http2=True, verify=verify, timeout=PROMPT_S, trust_env=False
            ) as client:
                front = Front(running, client)
                await eventually_async(lambda: _serves(client))
                await _check_the_path_of_a_request(front)
                await _check_http_1(front, url, verify)
                await _check_chunks_come_one_by_one(front)
                await _check_a_pause_in_a_stream(front)
                await _check_clients_that_leave(front, url, verify)
                await _check_large_bodies(front)
                await _check_hidden_paths(front)
                await _check_connections_are_kept(front)
                await stack.aclose()
                await _check_a_restart(client, port)


async def _serves(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


async def _check_the_path_of_a_request(front: Front) -> None:
    headers = {"x-forwarded-for": "192.0.2.1", "x-request-id": "mine"}
    answer = await front.chat(headers=headers)
    assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
    assert answer.headers["x-gateway-backend"] == "a"
    assert answer.headers["x-request-id"] == "mine"
    seen = front.running.upstreams["a"].seen[-1]
    assert (seen.header("x-forwarded-for") or "192.0.2.1").split(",")[-1].strip() != "192.0.2.1"
    assert seen.header("x-forwarded-proto") == "https"
    assert (await front.client.post("/tokenize", json={"model": MODEL, "prompt": "a"})).status_code == 200
    error = (await front.client.post("/v1/chat/completions", json={"model": "unknown", "messages": []})).json()["error"]
    assert "unknown" in error["message"]


async def _check_http_1(front: Front, url: str, verify: ssl.SSLContext) -> None:
    async with httpx.AsyncClient(base_url=url, verify=verify, timeout=PROMPT_S, trust_env=False) as client:
        answer = await client.get("/v1/models")
        assert (answer.status_code, answer.http_version) == (200, "HTTP/1.1")
        await _check_chunks_come_one_by_one(Front(front.running, client))


async def _check_chunks_come_one_by_one(front: Front) -> None:
    """The engine writes a chunk only after the client has the one before."""
    received = asyncio.Queue[None]()

    async def one_by_one(wire: Wire) -> None:
        await wire.begin_stream()
        for text in ("one", "two", "three"):
            await wire.chunk(delta(text))
            await received.get()
        await wire.chunk(END)
        await wire.end_stream()

    front.running.upstreams["a"].behaviour = one_by_one
    texts = []
    async with front.stream() as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", ""))
                received.put_nowait(None)
    assert [text for text in texts if text] == ["one", "two", "three"]


async def _check_a_pause_in_a_stream(front: Front) -> None:
    async def pauses(wire: Wire) -> None:
        await wire.stream(delta("one"), delta("two") + END, pause_s=PAUSE_S)

    front.running.upstreams["a"].behaviour = pauses
    async with front.stream() as answer:
        assert (await answer.aread()).endswith(b"data: [DONE]\n\n")


async def _check_clients_that_leave(front: Front, url: str, verify: ssl.SSLContext) -> None:
    """A closed connection, or a reset stream of a connection that stays, ends the request in the engine."""
    upstream = front.running.upstreams["a"]

    upstream.behaviour = endless
    async with httpx.AsyncClient(base_url=url, verify=verify, timeout=PROMPT_S, trust_env=False) as client:
        async with Front(front.running, client).stream() as answer:
            await anext(answer.aiter_raw())
    await eventually(lambda: upstream.aborted == 1, PROMPT_S)
    async with _reset_stream(url, verify):
        await eventually(lambda: upstream.aborted == 2, PROMPT_S)
    upstream.behaviour = well


@contextlib.asynccontextmanager
async def _reset_stream(url: str, verify: ssl.SSLContext) -> AsyncIterator[None]:
    """Reset a stream of HTTP/2 after its first data, as browsers do, and keep the connection."""
    verify.set_alpn_protocols(["h2"])
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("localhost", port, ssl=verify)
    connection = H2Connection()
    connection.initiate_connection()
    body = json.dumps(_body("hi", {"stream": True})).encode()
    head = {":method": "POST", ":scheme": "https", ":authority": f"localhost:{port}", ":path": "/v1/chat/completions"}
    connection.send_headers(1, [*head.items(), ("content-length", str(len(body)))])
    connection.send_data(1, body, end_stream=True)
    while True:
        writer.write(connection.data_to_send())
        events = connection.receive_data(await reader.read(65536))
        if any(isinstance(event, DataReceived) for event in events):
            break
    connection.reset_stream(1, ErrorCodes.CANCEL)
    writer.write(connection.data_to_send())
    yield
    writer.close()


async def _check_large_bodies(front: Front) -> None:
    text = "a long prompt " * 22_000
    assert (await front.chat(text)).status_code == 200
    assert front.running.upstreams["a"].seen[-1].json["messages"][0]["content"] == text
    refused = await front.chat("x" * 2**21)
    assert refused.status_code == 413
    assert refused.json()["error"]["message"]


async def _check_hidden_paths(front: Front) -> None:
    for path in HIDDEN:
        answer = await front.client.get(front.client.base_url.copy_with(raw_path=path.encode()))
        assert answer.status_code in {400, 404}, path
        assert "gateway_" not in answer.text, path
    assert (await front.client.get("/metrics")).json()["error"]["message"] == "There is nothing at this path."


async def _check_connections_are_kept(front: Front) -> None:
    before = set(front.running.server.connections)
    for _ in range(8):
        assert (await front.chat()).status_code == 200
    assert len(set(front.running.server.connections) - before) <= 1


async def _check_a_restart(client: httpx.AsyncClient, port: int) -> None:
    async def is_refused() -> bool:
        answer = await client.get("/v1/models")
        return answer.status_code == 503 and bool(answer.json()["error"]["message"])

    await eventually_async(is_refused)
    async with start_gateway({"a": "baseline"}, port=port, **SETTINGS):
        await eventually_async(lambda: _serves(client))
