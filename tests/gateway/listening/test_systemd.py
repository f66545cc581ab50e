"""What systemd passes to a gateway, and hears of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from backends.validation import UsageError
from gateway.listening import systemd
from gateway.listening.systemd import ServiceManager
from tests.support.command import Command, gateway_command, until
from tests.support.pool_file import NOWHERE, write_pool
from tests.support.waiting import TIMEOUT_S, eventually_blocking

LAUNCH = """
import os, sys
for number, received in enumerate(sys.argv[1].split(",")):
    os.dup2(int(received), 3 + number)
os.environ["LISTEN_PID"] = os.environ["WATCHDOG_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "gateway", *sys.argv[2:]])
"""
"""Becomes the gateway, as a process that systemd starts does."""


class Manager:
    """Holds the sockets of a gateway and hears what it says, as systemd does."""

    def __init__(self, folder: Path) -> None:
        self.heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heard.bind(str(folder / "notify"))
        self.said: list[str] = []
        self.heard_s = 0.0
        self.clients, self.admin = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        self.env = {
            "LISTEN_FDS": "2",
            "LISTEN_FDNAMES": "gateway.socket:admin",
            "NOTIFY_SOCKET": str(folder / "notify"),
            "WATCHDOG_USEC": "400000",
        }

    def hear(self) -> None:
        with contextlib.suppress(OSError):
            while said := self.heard.recv(100):
                self.said.append(said.decode())
                self.heard_s = time.monotonic()

    def until_it_says(self, state: str) -> None:
        eventually_blocking(lambda: state in self.said, what=state)

    def url(self, opened: socket.socket) -> str:
        return f"http://127.0.0.1:{opened.getsockname()[1]}"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    hearing = threading.Thread(target=made.hear)
    hearing.start()
    with made.heard, made.clients, made.admin:
        yield made
        made.heard.shutdown(socket.SHUT_RDWR)
        hearing.join()


@contextlib.contextmanager
def started(manager: Manager, folder: Path, workers: int) -> Iterator[Command]:
    admin = {"listen": "127.0.0.1:1", "key": "k"}  # a port that it may not open
    pool = write_pool(folder / "pool.yaml", {"a": NOWHERE}, server={"drain_s": 3}, admin=admin)
    passed = (manager.clients.fileno(), manager.admin.fileno())
    launch = ("-c", LAUNCH, ",".join(map(str, passed)))
    arguments = ("--workers", str(workers))
    with gateway_command(pool, folder, *arguments, env=manager.env, launch=launch, passed=passed) as command:
        yield command


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_passed_sockets_outlive_the_gateway_and_it_says_what_it_does(
    manager: Manager, tmp_path: Path, workers: int
) -> None:
    with started(manager, tmp_path, workers) as command:
        manager.until_it_says("READY=1")
        until(lambda: command.url)
        assert (command.url, command.admin_url) == (manager.url(manager.clients), manager.url(manager.admin))
        assert command.get("/health").status_code == 200
        admin = httpx.get(f"{command.admin_url}/admin/pool", headers={"authorization": "Bearer k"}, trust_env=False)
        assert admin.status_code == 200
        manager.until_it_says("WATCHDOG=1")
        command.process.send_signal(signal.SIGTERM)
        manager.until_it_says("STOPPING=1")
        assert command.process.wait(TIMEOUT_S) == 0
    with socket.create_connection(manager.clients.getsockname()) as waiting:  # for the next gateway
        waiting.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        with started(manager, tmp_path, workers):
            waiting.settimeout(TIMEOUT_S)
            assert waiting.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
def test_the_watchdog_hears_nothing_of_a_process_that_stands(manager: Manager, tmp_path: Path) -> None:
    with started(manager, tmp_path, 1) as command:
        manager.until_it_says("READY=1")
        command.process.send_signal(signal.SIGSTOP)
        eventually_blocking(lambda: time.monotonic() - manager.heard_s > 0.4, what="longer than the watchdog's time")
        command.process.send_signal(signal.SIGABRT)
        command.process.send_signal(signal.SIGCONT)
        assert command.process.wait(TIMEOUT_S) == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in command.printed()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # a gateway ends with it
@pytest.mark.parametrize(
    ("names", "problem"), [("a.socket:b.socket", "b.socket is not the only one"), ("admin:x", "x does not listen")]
)
def test_sockets_that_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch, names: str, problem: str) -> None:
    monkeypatch.setattr(systemd, "_FIRST_FD", first := 700)
    for name, value in {"FDS": "2", "PID": str(os.getpid()), "FDNAMES": names}.items():
        monkeypatch.setenv(f"LISTEN_{name}", value)
    with socket.create_server(("127.0.0.1", 0)) as opened, socket.socket() as idle:
        os.dup2(opened.fileno(), first)
        os.dup2((idle if names.endswith("x") else opened).fileno(), first + 1)
        with pytest.raises(UsageError, match=problem):
            ServiceManager()


def test_what_was_passed_to_another_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getppid()))
    assert ServiceManager().sockets == {}
    assert "LISTEN_FDS" not in os.environ
