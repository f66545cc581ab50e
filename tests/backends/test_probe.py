"""Probes of replicas whose pages are too long, compressed, or never end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from backends.backend import Backend
from backends.http import authorities
from backends.probe import Probe, ProbeResult
from backends.speculation import Method
from tests.support.certificates import make_pair, replace
from tests.support.upstream import Behaviour, Upstream, Wire, hang
from tests.support.waiting import eventually

LINE = b"# a comment\n"
BOMB = gzip.compress(LINE * 4_000_000)  # each process that collects tests makes it
PAGE = b"vllm:num_requests_running 1\n"


@contextlib.asynccontextmanager
async def probe_of(url: str, timeout_s: float = 5.0) -> AsyncIterator[Probe]:
    probe = Probe(Backend("a", "m", Method.BASELINE, url), timeout_s)
    try:
        yield probe
    finally:
        await probe.close()


async def probed(url: str) -> ProbeResult:
    async with probe_of(url) as probe:
        return await probe.run(admit=True)


async def default_temperature(url: str) -> float | None:
    async with probe_of(url) as probe:
        return await probe.default_temperature()


def whole(body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%b\r\n" % (len(body), headers) + body


async def a_bomb(wire: Wire) -> None:
    await wire.send(whole(BOMB, b"content-encoding: gzip\r\n"))


async def without_an_end(wire: Wire) -> None:
    await wire.begin_stream()
    with contextlib.suppress(ConnectionError):
        while True:
            await wire.chunk(PAGE + LINE * 5000)
    wire.upstream.aborted += 1


async def of_50_mb(wire: Wire) -> None:
    with contextlib.suppress(ConnectionError):
        await wire.send(whole(PAGE + LINE * 4_000_000))
    wire.upstream.aborted += 1


@pytest.mark.parametrize(
    ("url", "problem", "refused"),
    [
        ("http://nosuch.invalid:8000", "has an address that does not resolve: nosuch.invalid (", False),
        ("http://127.0.0.1:9", "refuses connections (", True),
        ("http://localhost:9", "refuses connections (", True),
        ("unix:/nosuch.sock", "refuses connections (", True),
    ],
)
async def test_why_there_is_no_connection(url: str, problem: str, refused: bool) -> None:
    result = await probed(url)
    assert (result.problem or "").startswith(problem)
    assert result.refused is refused


async def test_http_where_tls_is_expected_refuses_nothing() -> None:
    """Uvicorn, vLLM's server, answers a handshake at once, for it is no request."""
    config = uvicorn.Config(lambda: None, log_config=None, lifespan="off", ws="none")
    config.load()
    protocol = functools.partial(config.http_protocol_class, config, ServerState(), {})  # type: ignore[call-arg]
    async with await asyncio.get_running_loop().create_server(protocol, "127.0.0.1") as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        result = await probed(url)
    assert (result.problem or "").startswith("cannot be connected to by TLS (")
    assert not result.refused


async def test_authorities_that_replace_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = make_pair(tmp_path / "before"), make_pair(tmp_path / "after")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(after.certificate, after.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(before.certificate))
    monkeypatch.setattr(authorities, "trusted", functools.cache(authorities.trusted.__wrapped__))
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
        async with probe_of(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}") as probe:
            for _ in range(2):
                assert "certificate verify failed" in ((await probe.run(admit=True)).problem or "")
            replace(before.certificate, after.certificate)
            await probe.run(admit=True)
            assert (await probe.run(admit=True)).problem.startswith("fails its health check (RemoteProtocolError")
    # A thread that waits for more would be waited for at exit, and be called hung.
    await eventually(lambda: not any(each.name.startswith("authorities") for each in threading.enumerate()))


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"health_status": 503}, "/health answered 503"),
        ({"health_hangs": True}, "does not answer"),
        ({"models": b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n"}, "set the backend's api_key"),
        ({"models": whole(b"<br>")}, "/v1/models did not answer with a list of models"),
        ({"model": "other"}, "serves other, not m: start it with --served-model-name m, or call the model other"),
    ],
)
async def test_an_unhealthy_replica_has_a_reason(engine: dict[str, Any], problem: str) -> None:
    async with Upstream(**{"name": "a", "model": "m", **engine}) as upstream, probe_of(upstream.url, 0.3) as probe:
        assert problem in ((await probe.run(admit=True)).problem or "")


@pytest.mark.parametrize("page", [a_bomb, without_an_end, of_50_mb])
async def test_a_metrics_page_beyond_all_bounds_is_ignored_and_said(page: Behaviour) -> None:
    async with Upstream("a", "m", metrics_behaviour=page) as upstream:
        async with asyncio.timeout(20), probe_of(upstream.url) as probe:
            result = await probe.run(admit=True)
            assert (result.problem, result.engine, result.ignored) == (None, None, ("metrics",))
            if page is not a_bomb:
                await eventually(lambda: upstream.aborted == 1)  # no more of it is read


async def trickle(wire: Wire) -> None:
    """Send some of a page again and again, each in time."""
    await wire.begin_stream()
    with contextlib.suppress(ConnectionError):
        while True:
            await wire.chunk(LINE)
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("page", [hang, trickle])
async def test_a_metrics_page_that_takes_long_is_no_failed_health_check(page: Behaviour) -> None:
    upstream = Upstream("a", "m", metrics_behaviour=page)
    async with asyncio.timeout(10.0), upstream, probe_of(upstream.url, 0.5) as probe:
        result = await probe.run(admit=True)
    assert (result.problem, result.late, result.engine, result.ignored) == (None, False, None, ("metrics",))


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        (whole(b" " * 3_000_000 + b'{"data": [{"id": "m"}]}'), "/v1/models is longer than 1048576 bytes"),
        (whole(BOMB, b"content-encoding: gzip\r\n"), "/v1/models came compressed (gzip), which was not asked for"),
        (whole(json.dumps({"data": [{"id": "m", "x": "x" * 20_000}]}).encode()), "/v1/models says more than 16384"),
        (whole(b'{"data": [{"id": "m", "x": %b%b}]}' % (b"[" * 500, b"]" * 500)), "/v1/models did not answer with"),
        (whole(json.dumps({"data": [{"id": "x" * 9000} for _ in range(90)]}).encode()), f"serves {'x' * 80}, not m"),
    ],
)
async def test_a_list_of_models_beyond_all_bounds_is_a_problem(models: bytes, problem: str) -> None:
    async with Upstream("a", "m", models=models) as upstream:
        found = (await probed(upstream.url)).problem or ""
    assert found.startswith(problem)
    assert len(found) < 1000


@pytest.mark.parametrize(
    ("length", "tokens"), [(4096, 4096), (2**60, 0), (-1, 0), (1e308, 0), ("4096", 0), (True, 0), (None, 0)]
)
async def test_a_context_that_cannot_be_is_unknown(length: object, tokens: int) -> None:
    models = whole(json.dumps({"data": [{"id": "m", "max_model_len": length}]}).encode())
    async with Upstream("a", "m", models=models) as upstream:
        result = await probed(upstream.url)
    assert (result.problem, result.said and result.said.context_tokens) == (None, tokens)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"object": "response", "temperature": 0.25}, 0.25),
        (200, {"object": "response"}, None),
        *((200, {"temperature": wrong}, None) for wrong in ("hot", -1, True, None)),
        (200, [], None),
        (404, {"detail": "Not Found"}, None),
    ],
)
async def test_an_engine_is_asked_for_its_default_temperature(
    status: int, body: dict[str, object], expected: float | None
) -> None:
    asked: list[dict[str, object]] = []

    async def answer(wire: Wire) -> None:
        asked.append(wire.seen.json)
        text = json.dumps(body).encode()
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(text))
        await wire.send(head + text)

    async with Upstream("a", "m") as upstream:
        upstream.behaviour = answer
        assert await default_temperature(upstream.url) == expected
    assert asked == [{"model": "m", "input": "Hi", "max_output_tokens": 1, "store": False}]


async def test_an_engine_that_is_gone_reports_no_temperature() -> None:
    assert await default_temperature("http://127.0.0.1:1") is None
