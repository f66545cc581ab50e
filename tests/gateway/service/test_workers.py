"""Gateways with one and several worker processes: startup, shared limits, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends import background
from benchmarks.metrics_page import total
from gateway.config.pool_file import PoolFile
from gateway.listening.listener import listen
from gateway.peers import exchange
from gateway.rooms.batches import room as batches
from gateway.rooms.recorder import recorder
from gateway.rooms.reports import room as reports
from gateway.routing.keys import digest
from gateway.service import server, worker, workers
from gateway.service.replicas import plan
from gateway.service.worker import Assignment, Configuration, Link, Worker, work
from gateway.service.workers import Workers
from gateway.state import sync
from tests.support.command import ADMIN_KEY, Command, alive, family, gateway_command, until, until_ready
from tests.support.pool_file import CHAT, write_pool
from tests.support.upstream import Wire, upstreams_in_thread, well
from tests.support.waiting import TIMEOUT_S, eventually

KEY = {"authorization": "Bearer sk-plain"}


async def slowly(wire: Wire) -> None:
    """Answer after the time of a report between workers."""
    await asyncio.sleep(0.05)
    await well(wire)


@contextlib.contextmanager
def pool_file(folder: Path, **admin: Any) -> Iterator[Path]:
    """A pool file with two upstreams, which run on their own event loop."""
    with upstreams_in_thread("ab", "m", slowly) as upstreams:
        yield write_pool(
            folder / "pool.yaml",
            {each.name: each.url for each in upstreams},
            server={"drain_s": 3},
            health={"interval_s": 0.2},
            keys=[{"name": "plain", "key": "sk-plain"}, {"name": "four", "key": "sk-four", "max_in_flight": 4}],
            admin={"key": ADMIN_KEY, **admin},
        )


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Path]:
    with pool_file(tmp_path) as path:
        yield path


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A gateway with two workers, both of them ready, for several tests."""
    folder = tmp_path_factory.mktemp("two")
    with pool_file(folder) as path, gateway_command(path, folder, "--workers", "2") as command:
        until_ready(command)
        yield command


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_it_prints_its_address_once_all_accept_and_leaves_no_process(pool: Path, tmp_path: Path, workers: int) -> None:
    with gateway_command(pool, tmp_path, "--workers", str(workers)) as command:
        port = int(command.url.rpartition(":")[2])
        assert listeners(port) == workers
        for _ in range(8):
            assert command.get("/health").status_code == 200  # without waiting
        until(lambda: command.post("/v1/chat/completions", CHAT, headers=KEY).status_code == 200)
        processes = family(command.process.pid)
        assert len(processes) > (workers if workers > 1 else 0)
        assert command.end() == 0
        until(lambda: alive(processes) == set())
        assert "Traceback" not in command.printed()


@pytest.mark.slow
def test_workers_share_metrics_and_draining(two: Command) -> None:
    def counted() -> float:
        return total(two.get("/metrics").text, "gateway_requests_total", outcome="ok")

    before = counted()
    for _ in range(40):
        assert two.post("/v1/chat/completions", CHAT, headers=KEY).status_code == 200
    until(lambda: counted() == before + 40)
    backend = {"model": "m", "backend": "a"}
    assert two.post("/admin/drain", backend, headers=two.admin).json()["state"] == "draining"
    until(lambda: states(two) == {"draining"})
    two.post("/admin/resume", backend, headers=two.admin)
    until(lambda: states(two) == {"up"})


@pytest.mark.slow
def test_who_keeps_to_the_requests_in_flight_of_a_key_is_never_refused(two: Command) -> None:
    """Also if the next request comes to another worker, where the end of the one before is not known yet."""

    def ask(times: int) -> list[int]:
        with httpx.Client(base_url=two.url, timeout=TIMEOUT_S, trust_env=False) as client:
            headers = {"authorization": "Bearer sk-four", "connection": "close"}
            return [client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code for _ in range(times)]

    with ThreadPoolExecutor(4) as clients:
        assert Counter(status for answered in clients.map(ask, [25] * 4) for status in answered) == {200: 100}


def states(command: Command) -> set[str]:
    """Return the states of `a` in the workers that answer twelve requests."""
    pools = [command.get("/admin/pool", headers=command.admin).json() for _ in range(12)]
    return {each["models"]["m"]["backends"]["a"]["state"] for each in pools}


@contextlib.asynccontextmanager
async def two_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Workers, asyncio.Event]]:
    """The parent of two workers, and whether both have started."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder / "metrics"))
    monkeypatch.setattr(workers, "_FIRST_BACKOFF_S", 0.05)
    backends = {"a": {"method": "baseline", "url": "http://127.0.0.1:1"}}
    model = {"policy": {"name": "round_robin"}, "default_temperature": 1.0, "backends": backends}
    settings = PoolFile.model_validate({"models": {"m": model}, "server": {"workers": 2}, "state": "none"})
    current = Configuration(0, settings, plan(settings, folder).backends, digest(ADMIN_KEY))
    started = asyncio.Event()
    with listen("127.0.0.1", 0, shared=True) as opened:
        assignment = Assignment(0, current, [opened.getsockname()[:2]], folder)
        parent = Workers(assignment, reload=unwanted, on_started=started.set)
        running = asyncio.create_task(parent.run())
        try:
            yield parent, started
        finally:
            parent.stop()
            await running
    assert parent._workers == {}


@pytest.mark.slow
async def test_workers_outlive_the_removal_of_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_workers(tmp_path / "run", monkeypatch) as (parent, started):
        await started.wait()
        (tmp_path / "run").rename(tmp_path / "removed")  # at once: reports are written meanwhile
        await eventually(lambda: len([*(tmp_path / "run/peers").glob("*")]) == 2, what="both report again")
        before = parent._workers[0].process.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await eventually(lambda: 0 in parent._workers and parent._workers[0].process.pid != before)
        await eventually(lambda: parent._workers[0].said is not None, what="a worker starts again")


@pytest.mark.slow
async def test_workers_take_no_folder_that_another_user_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, hostile = tmp_path / "run", tmp_path / "hostile"
    for folder in (hostile, hostile / "peers"):
        folder.mkdir()
        folder.chmod(0o777)
    async with two_workers(run, monkeypatch) as (_, started):
        await started.wait()
        monkeypatch.setattr(background, "_logged", background.Seldom())
        run.rename(tmp_path / "removed")
        hostile.rename(run)  # open at once: the workers report meanwhile
        await eventually(lambda: "another user made it or may write there; remove it" in caplog.text)
        assert [*run.iterdir()] == [run / "peers"]
        assert [*(run / "peers").iterdir()] == []
        run.rename(tmp_path / "other")
        await eventually(lambda: len([*(run / "peers").glob("*")]) == 2, what="both report again")


async def unwanted(**_: object) -> list[str]:
    raise AssertionError("nobody asks for a reload")


@pytest.mark.slow
async def test_a_silent_worker_is_killed_and_one_that_ran_well_is_soon_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "_SILENT_S", 6.0)
    monkeypatch.setattr(workers, "_BACKOFF_RESET_S", 0.0)
    async with two_workers(tmp_path, monkeypatch) as (parent, started):
        await started.wait()
        for restarts in (1, 2):
            before = parent._workers[0].process.pid
            assert before is not None
            os.kill(before, signal.SIGSTOP)
            await eventually(lambda gone=before: 0 in parent._workers and parent._workers[0].process.pid != gone)
            assert caplog.text.count("worker 0 has been silent for") >= restarts
            again = caplog.text.count("worker 0 exited with status -9; restarting it in ")
            assert caplog.text.count("worker 0 exited with status -9; restarting it in 0.05 s") == again >= restarts
            await eventually(lambda: parent._workers[0].heard_s <= time.monotonic())


async def test_a_worker_says_that_it_has_made_a_change_once_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = asyncio.Event()

    async def prepare(*_: object) -> Any:
        await prepared.wait()
        raise ArithmeticError

    monkeypatch.setattr(worker, "prepare", prepare)
    monkeypatch.setattr(worker, "ALIVE_S", 0.01)
    backends = {"a": {"method": "baseline", "url": "http://127.0.0.1:1"}}
    model = {"policy": {"name": "round_robin"}, "default_temperature": 1.0, "backends": backends}
    current = Configuration(0, PoolFile.model_validate({"models": {"m": model}, "state": "none"}), [], b"")
    ours, theirs = socket.socketpair()
    parent = await Link.over(ours)
    link = await Link.over(theirs)
    one = Worker(current, tmp_path, link)
    alive, follows = asyncio.create_task(one.show_life()), asyncio.create_task(one.follow())
    parent.send(replace(current, number=1))
    said = parent.messages()
    assert [(await anext(said)).number for _ in range(5)] == [0] * 5
    prepared.set()
    while (last := await anext(said)).number == 0:
        pass
    assert last.problem == "ArithmeticError"
    alive.cancel()
    parent.close()
    await follows
    link.close()
    await asyncio.sleep(0.0)


def test_a_worker_is_given_the_time_that_its_parts_may_take_to_end() -> None:
    rooms_s = batches._END_S + recorder._STOP_S + 2 * reports._STOP_S  # an access log and spans
    state_s = 2 * exchange._LEAVE_S + sync._STOP_TIMEOUT_S + sync._CLOSE_TIMEOUT_S
    assert server._ABORT_S + rooms_s + state_s + background._LAST_S <= workers._GRACE_S


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(pool: Path, tmp_path: Path) -> None:
    with gateway_command(pool, tmp_path, "--workers", "2") as command:
        until(lambda: command.get("/readyz").status_code == 200)
        processes = family(command.process.pid)
        command.process.kill()
        command.process.wait()
        until(lambda: alive(processes) == set())


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "metrics"), [(1, False), (2, True)])
def test_admin_has_an_address_of_its_own(tmp_path: Path, workers: int, metrics: bool) -> None:
    with (
        pool_file(tmp_path, listen="127.0.0.1:0", metrics=metrics) as pool,
        gateway_command(pool, tmp_path, "--workers", str(workers)) as command,
    ):
        assert command.admin_url not in {"", command.url}
        addresses, get = (command.url, command.admin_url), partial(httpx.get, timeout=TIMEOUT_S, trust_env=False)
        expected = {"/admin/pool": (404, 200), "/metrics": (404, 200) if metrics else (200, 404), "/health": (200, 200)}
        expected |= {"/v1/models": (200, 404), "/version": (200, 404), "/dashboard": (404, 200)}
        for _ in range(4 * workers):  # each on a connection of its own, so that every worker answers
            for path, statuses in expected.items():
                for url, status in zip(addresses, statuses, strict=True):
                    headers = command.admin if path.startswith("/admin") else KEY
                    assert get(url + path, headers=headers).status_code == status, (path, url)
        public, admin = (get(f"{url}/admin/pool").status_code for url in addresses)
        assert (public, admin) == (404, 401), "where it is not, the key is not looked at"
        asked = httpx.post(f"{command.admin_url}/v1/chat/completions", json=CHAT, headers=KEY, trust_env=False)
        assert asked.status_code == 404
        assert command.end() == 0


def listeners(port: int) -> int:
    """Return the number of sockets that accept connections at a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


@pytest.mark.slow
def test_each_worker_shows_on_the_dashboard_what_all_have_counted(two: Command) -> None:
    def shown() -> dict[int, tuple[bool, int]]:
        """Return what the workers that answer show: whether they have begun to, and the streams."""
        found = {}
        for _ in range(20):
            answer = two.get("/admin/dashboard/snapshot", headers=two.admin).json()
            counts = [(each["ttft"] or {"count": 0})["count"] for each in answer["models"][0]["backends"]]
            found[answer["process"]["pid"]] = (bool(answer["points_at_s"]), sum(counts))
        return found

    until(lambda: [*shown().values()] == [(True, 0)] * 2)
    for _ in range(12):
        assert two.post("/v1/chat/completions", CHAT | {"stream": True}, headers=KEY).status_code == 200
    until(lambda: [*shown().values()] == [(True, 12)] * 2)


def first_works(assignment: Assignment, link: socket.socket) -> None:
    """Run the first worker; the other one never starts."""
    if assignment.worker:
        signal.pause()
    work(assignment, link)


@pytest.mark.slow
async def test_a_worker_that_never_starts_holds_up_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "work", first_works)
    async with two_workers(tmp_path, monkeypatch) as (parent, _):
        await eventually(lambda: len(parent._workers) == 2 and parent._workers[0].said is not None)
        hung = parent._workers[1].process
        hung.kill()  # as the parent does after a time
        await eventually(lambda: 1 in parent._workers and parent._workers[1].process is not hung)
        current = parent._current
        await asyncio.wait_for(parent.change(current.settings, current.backends, current.admin_digest), TIMEOUT_S)
        assert not parent._is_behind(0)
