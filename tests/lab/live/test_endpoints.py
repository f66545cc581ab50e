"""What an endpoint is asked beside the run."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from backends.http import authorities
from backends.validation import UsageError
from lab.live.endpoints import LiveEndpoint, engine_counters, inspect_endpoint
from tests.support.certificates import make_pair
from tests.support.upstream import Upstream, Wire

LONG = b"HTTP/1.1 200 OK\r\ncontent-length: 3000000\r\n\r\n" + b" " * 3_000_000


async def test_answers_beyond_all_bounds_are_not_read() -> None:
    async def page(wire: Wire) -> None:
        await wire.send(LONG)

    async with Upstream("a", "m", models=LONG, metrics_behaviour=page) as server:
        endpoint = LiveEndpoint.of(server.url, None, None)
        with pytest.raises(UsageError, match="/v1/models is longer than 1048576 bytes"):
            await inspect_endpoint(endpoint, ["chat"], 0)
        assert await engine_counters(endpoint) is None


async def test_authorities_are_those_of_all_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, context = make_pair(tmp_path / "tls"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))
    monkeypatch.setattr("lab.live.endpoints.trusted", authorities.trusted.__wrapped__)
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
        endpoint = LiveEndpoint.of(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None)
        with pytest.raises(UsageError, match="RemoteProtocolError"):
            await inspect_endpoint(endpoint, ["chat"], 0)
