"""The limits that a gateway process sets itself, and running out of open files."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
from pathlib import Path

import pytest

from gateway.config.settings.server import ServerSettings
from gateway.service.server import server_limits
from tests.support.command import gateway_command, until
from tests.support.pool_file import NOWHERE, write_pool
from tests.support.waiting import TIMEOUT_S


def test_connections_leave_files_for_those_to_backends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = ServerSettings(max_connections=500)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2000, 2000))
    assert server_limits(settings).connections == 500
    assert caplog.records == []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    assert server_limits(settings).connections == 468
    assert "max_connections (500)" in caplog.text


def ask(port: int) -> bytes:
    """Return the answer to a request on a new connection; empty if the gateway closes it."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
            return connection.recv(4096)
        except ConnectionError:
            return b""


@pytest.mark.slow
def test_a_gateway_that_is_out_of_open_files_says_so_and_goes_on(tmp_path: Path) -> None:
    with gateway_command(write_pool(tmp_path / "pool.yaml", {"a": NOWHERE}), tmp_path) as gateway:
        pid, port = gateway.process.pid, int(gateway.url.rpartition(":")[2])
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            until(lambda: "no more files can be opened" in gateway.printed(), what="the log")
            assert [ask(port) for _ in range(50)] == [b""] * 50
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        until(lambda: ask(port).startswith(b"HTTP/1.1 200 "), what="an answer")
        assert gateway.printed().count("no more files can be opened") == 1
        assert gateway.end() == 0
