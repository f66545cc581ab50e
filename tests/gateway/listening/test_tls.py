"""TLS at the gateway's own addresses: served, renewed, and hostile or clumsy clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from gateway.config.settings import TlsSettings
from gateway.http.server import HttpServer, ServerLimits
from gateway.listening import listener
from gateway.listening.certificate import Certificate
from tests.support.certificates import copied, make_pair, replace
from tests.support.command import gateway_command, until
from tests.support.pool_file import CHAT, write_pool
from tests.support.upstream import upstreams_in_thread
from tests.support.waiting import TIMEOUT_S, eventually


class Served:
    """A gateway that speaks TLS."""

    def __init__(self, port: int, trusted: TlsSettings) -> None:
        self.port = port
        self.context = ssl.create_default_context(cafile=str(trusted.certificate))

    def asks(self, method: str = "GET", path: str = "/health", body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=TIMEOUT_S, context=self.context)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[TlsSettings]:
    folder = tmp_path_factory.mktemp("tls")
    return [make_pair(folder / str(number)) for number in range(2)]


@contextlib.contextmanager
def served(tls: TlsSettings, folder: Path, workers: int = 1) -> Iterator[tuple[int, int]]:
    with upstreams_in_thread("a", "m") as (upstream,):
        pair = {"certificate": str(tls.certificate), "key": str(tls.key)}
        pool = write_pool(
            folder / "pool.yaml",
            {"a": upstream.url},
            server={"tls": pair, "max_connections": 32, "workers": workers},
            health={"interval_s": 0.2},
            admin={"listen": "127.0.0.1:0"},
        )
        with gateway_command(pool, folder) as command:
            assert command.url.startswith("https://")
            assert command.admin_url.startswith("https://")
            assert "curl -N https://" in command.printed()
            yield int(command.url.rpartition(":")[2]), int(command.admin_url.rpartition(":")[2])
            assert command.end() == 0
            assert "Traceback" not in command.printed()


@pytest.mark.slow
def test_a_renewed_certificate_is_shown_while_connections_stay(pairs: list[TlsSettings], tmp_path: Path) -> None:
    used = copied(pairs[0], tmp_path)
    with served(used, tmp_path, workers=2) as (port, admin_port):
        before, after = Served(port, pairs[0]), Served(port, pairs[1])
        chat = {**CHAT, "stream": True}
        until(lambda: before.asks("POST", "/v1/chat/completions", chat)[0] == 200)
        assert before.asks("POST", "/v1/chat/completions", chat)[1].endswith(b"data: [DONE]\n\n")
        assert Served(admin_port, pairs[0]).asks(path="/readyz")[0] == 200
        kept = http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=before.context)
        for _ in range(2):
            kept.request("GET", "/health")
            answer = kept.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
            replace(used.certificate, pairs[1].certificate)  # without its key: the one before is shown
            assert before.asks()[0] == 200
        replace(used.key, pairs[1].key)
        assert after.asks()[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            before.asks()
        kept.request("GET", "/health")
        assert kept.getresponse().status == 200
        kept.close()


@pytest.mark.slow
async def test_a_client_that_is_silent_is_said_to_be_slow(
    pairs: list[TlsSettings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "_TLS_S", 0.01)
    caplog.set_level("INFO")
    with socket.create_server(("127.0.0.1", 0)) as opened, socket.create_connection(opened.getsockname()):
        certificate = Certificate(pairs[0], "server.tls")
        await listener.Listener(HttpServer(Mock(), Mock()), opened, certificate)._begin_tls(opened.accept()[0])
    assert "(too slow)" in caplog.text


async def test_a_burst_of_silent_clients_leaves_no_more_handshakes_than_allowed(
    pairs: list[TlsSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_TLS_S", 1e6)
    opened = socket.create_server(("127.0.0.1", 0), backlog=64)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(opened.getsockname())) for _ in range(40)]
        server = HttpServer(Mock(), ServerLimits(connections=32))
        listening = listener.Listener(server, opened, Certificate(pairs[0], "server.tls"))
        await listening.start()
        await eventually(lambda: sum(map(_is_closed, clients)) == 36)  # all but an eighth of the connections
        for client in clients:
            client.close()
        await listening.close(is_shared=False)


def _is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def test_clients_that_do_not_begin_tls_keep_nobody_out(pairs: list[TlsSettings], tmp_path: Path) -> None:
    with served(pairs[0], tmp_path) as (port, _), contextlib.ExitStack() as stack:
        clear = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
        assert (clear.status_code, clear.json()["error"]["message"]) == (
            400,
            "This address speaks TLS: use https://.",
        )
        gone = socket.create_connection(("127.0.0.1", port))
        gone.close()
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
        for number, each in enumerate(opened):
            each.settimeout(TIMEOUT_S)
            with contextlib.suppress(ConnectionError):  # some are closed already
                each.sendall([b"", b"\x16\x03\x01\x02\x00", b"\x00" * 64][number % 3])
        assert Served(port, pairs[0]).asks()[0] == 200
        for each in opened[:3]:  # the oldest have made room
            with contextlib.suppress(ConnectionError):
                while each.recv(100):
                    pass
