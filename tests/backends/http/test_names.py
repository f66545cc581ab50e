"""Names that stop resolving, resolve slowly, or move, with real connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from backends import background
from backends.backend import Backend
from backends.http import authorities, names
from backends.http.address import Address, connect
from backends.probe import Probe
from backends.speculation import Method
from tests.support.certificates import make_pair
from tests.support.upstream import Upstream
from tests.support.waiting import eventually

NAME = "replica.test"
AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class FakeResolver:
    """Answers with addresses or an error, once it may."""

    def __init__(self) -> None:
        self.answer: list[str] | OSError = ["127.0.0.1"]
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = 0

    async def getaddrinfo(self, _: object, port: int | None, **__: object) -> list[tuple[Any, ...]]:
        self.asked += 1
        await self.answers.wait()
        if isinstance(self.answer, OSError):
            raise self.answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0)) for address in self.answer]


@pytest.fixture
async def resolver(monkeypatch: pytest.MonkeyPatch) -> FakeResolver:
    fake = FakeResolver()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fake.getaddrinfo)
    monkeypatch.setattr(names, "_names", {})
    monkeypatch.setattr(names, "_logged", background.Seldom())
    return fake


@contextlib.asynccontextmanager
async def replica() -> AsyncIterator[str]:
    async with Upstream("a", "m") as upstream:
        yield upstream.url.replace("127.0.0.1", NAME)


async def connected_to(url: str, tls: ssl.SSLContext | None = None) -> str:
    """Return the address that the relay's client gets a connection to, or why it gets none."""
    peers: list[str] = []

    class Peer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            peers.append(transport.get_extra_info("peername")[0])
            transport.close()

    error = await connect(Address.parse(url), Peer(), 5.0, tls)
    return peers[0] if error is None else str(error)


async def problem_at(url: str) -> str | None:
    """Return what a new probe finds wrong."""
    probe = Probe(Backend("a", "m", Method.BASELINE, url), 5.0)
    try:
        return (await probe.run(admit=True)).problem
    finally:
        await probe.close()


@pytest.mark.parametrize("failure", [AGAIN, UNKNOWN])
async def test_while_a_name_does_not_resolve_its_last_addresses_are_used(
    failure: OSError, resolver: FakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica() as url:
        assert await connected_to(url) == "127.0.0.1"
        resolver.answer = failure
        for _ in range(3):
            assert await connected_to(url) == "127.0.0.1"
            assert await problem_at(url) is None
    said = f"{NAME} does not resolve ({failure}): its last addresses, 127.0.0.1, are used; logged once a minute"
    assert caplog.messages == [said]


@pytest.mark.parametrize(("failure", "bound"), [(AGAIN, "_KEPT_S"), (UNKNOWN, "_UNKNOWN_KEPT_S")])
async def test_addresses_are_not_used_for_ever(
    failure: OSError, bound: str, resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, bound, 0.0)
    async with replica() as url:
        assert await problem_at(url) is None
        resolver.answer = failure
        assert await connected_to(url) == f"has an address that does not resolve ({failure.strerror})"
        assert await problem_at(url) == f"has an address that does not resolve: {NAME} ({failure.strerror})"


async def test_a_name_that_never_resolved_fails(resolver: FakeResolver, caplog: pytest.LogCaptureFixture) -> None:
    resolver.answer = AGAIN
    assert "does not resolve" in await connected_to(f"http://{NAME}:1")
    assert "does not resolve" in (await problem_at(f"http://{NAME}:1") or "")
    assert caplog.records == []


async def test_a_name_server_that_does_not_answer_is_asked_once_and_its_late_answer_counts(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica() as url:
        assert await connected_to(url) == "127.0.0.1"
        monkeypatch.setattr(names, "_PATIENCE_S", 0.0)
        resolver.answers.clear()
        assert [await connected_to(url) for _ in range(3)] == ["127.0.0.1"] * 3
        assert await problem_at(url) is None
        assert resolver.asked == 2
        resolver.answer = ["127.0.0.9"]
        resolver.answers.set()
        await eventually(lambda: names._names[NAME].addresses == ["127.0.0.9"])
        assert "refused" in await connected_to(url)


async def test_a_name_that_moves_is_followed_at_the_next_connection(resolver: FakeResolver) -> None:
    async with replica() as url:
        assert await connected_to(url) == "127.0.0.1"
        resolver.answer = ["127.0.0.2"]
        assert "refused" in await connected_to(url)
        assert "refuses connections" in (await problem_at(url) or "")
        resolver.answer = ["127.0.0.1"]
        assert await connected_to(url) == "127.0.0.1"


async def test_the_first_address_that_accepts_is_used(resolver: FakeResolver) -> None:
    resolver.answer = ["127.0.0.8", "127.0.0.1", "127.0.0.9"]
    async with replica() as url:
        assert await connected_to(url) == "127.0.0.1"
        assert await problem_at(url) is None


@pytest.mark.slow
@pytest.mark.parametrize(("certified", "is_right"), [(NAME, True), ("localhost", False)])
async def test_certificates_are_checked_by_name(
    certified: str, is_right: bool, resolver: FakeResolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(tmp_path / "pair", certified)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    asked: list[str] = []
    context.sni_callback = lambda _, name, __: asked.append(name)
    trusted = ssl.create_default_context(cafile=str(pair.certificate))
    monkeypatch.setattr(authorities, "trusted", lambda: trusted)
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
        url = f"https://{NAME}:{server.sockets[0].getsockname()[1]}"
        for resolver.answer in (["127.0.0.1"], AGAIN):
            relayed, probed = await connected_to(url, trusted), await problem_at(url) or ""
            assert relayed == "127.0.0.1" if is_right else "Hostname mismatch" in relayed
            assert ("RemoteProtocolError" if is_right else "Hostname mismatch") in probed  # connected, but no answer
    assert asked == [NAME] * 4
