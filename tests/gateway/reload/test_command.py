"""Reloads of a gateway process, with one worker and with two: SIGHUP, `/admin/reload`, and the file being watched."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command import ADMIN_KEY, Command, alive, family, gateway_command, until, until_ready
from tests.support.pool_file import CHAT, write_pool
from tests.support.upstream import upstreams_in_thread


class Pool:
    """A pool file, and three upstreams that run on an event loop of their own."""

    def __init__(self, path: Path, urls: dict[str, str]) -> None:
        self.path = path
        self.urls = urls

    def write(self, names: str, key: str = "sk-1", *, watch: bool = False, **more: Any) -> None:
        write_pool(
            self.path,
            {name: self.urls[name] for name in names},
            server={"drain_s": 3, "watch": watch},
            health={"interval_s": 0.2},
            keys=[{"name": "plain", "key": key}],
            admin={"key": ADMIN_KEY},
            state="none",
            **more,
        )


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with upstreams_in_thread("abc", "m") as upstreams:
        yield Pool(tmp_path / "pool.yaml", {each.name: each.url for each in upstreams})


def served_by(command: Command, requests: int = 12, key: str = "sk-1") -> set[str]:
    """Return the backends that answer, on a connection for each request; with their statuses if they are errors."""
    answers = [
        command.post("/v1/chat/completions", CHAT, headers={"authorization": f"Bearer {key}"}) for _ in range(requests)
    ]
    return {answer.headers.get("x-gateway-backend") or str(answer.status_code) for answer in answers}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_sighup_reloads_the_pool_file(pool: Pool, tmp_path: Path, workers: int) -> None:
    pool.write("ab")
    with gateway_command(pool.path, tmp_path, "--workers", str(workers)) as command:
        until_ready(command)
        processes = family(command.process.pid)
        assert served_by(command) == {"a", "b"}
        pool.write("bc", "sk-2")
        os.killpg(command.process.pid, signal.SIGHUP)  # the workers ignore it
        until(lambda: served_by(command, key="sk-2") == {"b", "c"})
        assert served_by(command, 4) == {"401"}
        printed = command.printed()
        assert f"models.m.backends.c: added (baseline, {pool.urls['c']})" in printed
        assert "models.m.backends.a: removed" in printed
        assert "keys[plain].sha256: changed" in printed
        assert "sk-2" not in printed
        assert alive(processes) == processes
        pool.path.write_text("models: {m: {polcy: 1}}")
        command.process.send_signal(signal.SIGHUP)
        until(lambda: "nothing was changed" in command.printed())
        assert served_by(command, key="sk-2") == {"b", "c"}
        until(lambda: 'gateway_reloads_total{cause="signal",outcome="invalid"} 1.0' in command.get("/metrics").text)
        until(lambda: 'backend="a"' not in command.get("/metrics").text, what="the series of the one that has left end")
        assert command.end() == 0


@pytest.mark.slow
def test_an_admin_key_that_was_removed_opens_nothing_more(pool: Pool, tmp_path: Path) -> None:
    pool.write("a")
    with gateway_command(pool.path, tmp_path, env={"GATEWAY_ADMIN_KEY": ""}) as command:
        until_ready(command)
        assert command.get("/admin/pool", headers=command.admin).status_code == 200
        without = {name: each for name, each in yaml.safe_load(pool.path.read_text()).items() if name != "admin"}
        pool.path.write_text(yaml.safe_dump(without))
        command.process.send_signal(signal.SIGHUP)
        until(lambda: command.get("/admin/pool", headers=command.admin).status_code == 401)
        assert ADMIN_KEY not in command.printed()
        until(lambda: "Admin key of this run: " in command.printed())
        generated = command.printed().partition("Admin key of this run: ")[2].split()[0]
        answer = command.get("/admin/pool", headers={"authorization": f"Bearer {generated}"})
        assert answer.status_code == 200


@pytest.mark.slow
def test_what_a_room_cannot_do_is_logged_at_the_start_and_after_a_reload(pool: Pool, tmp_path: Path) -> None:
    def compare(**what: object) -> None:
        pool.write("ab")
        settings = yaml.safe_load(pool.path.read_text())
        settings["models"]["m"]["compare"] = what
        pool.path.write_text(yaml.safe_dump(settings))

    compare(a="a", b="b")
    with gateway_command(pool.path, tmp_path) as command:
        until(lambda: "models.m.compare needs a state" in command.printed())
        compare(a="b", b="a")
        command.process.send_signal(signal.SIGHUP)
        until(lambda: command.printed().count("models.m.compare needs a state") == 2)


@pytest.mark.slow
def test_admin_reload_answers_with_what_has_changed(pool: Pool, tmp_path: Path) -> None:
    pool.write("ab")
    with gateway_command(pool.path, tmp_path, "--workers", "2") as command:
        until_ready(command)
        assert command.post("/admin/reload", None).status_code == 401
        assert command.post("/admin/reload", None, headers=command.admin).json()["changes"] == []
        pool.write("b")
        shown = command.post("/admin/reload?dry_run=true", None, headers=command.admin).json()
        assert shown == {"dry_run": True, "changes": ["models.m.backends.a: removed"]}
        assert served_by(command) == {"a", "b"}
        changed = command.post("/admin/reload", None, headers=command.admin).json()
        assert changed == {"dry_run": False, "changes": shown["changes"]}
        until(lambda: served_by(command) == {"b"})
        pool.write("b", recorder={"path": "/tmp/records"})
        refused = command.post("/admin/reload", None, headers=command.admin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "restart_needed")
        assert "recorder" in refused.json()["error"]["message"]
        pool.path.write_text("models: 3")
        invalid = command.post("/admin/reload", None, headers=command.admin)
        assert (invalid.status_code, invalid.json()["error"]["code"]) == (400, "invalid_pool_file")
        assert served_by(command) == {"b"}


@pytest.mark.slow
def test_a_storm_of_reloads_ends_with_the_last_file_also_in_workers_that_are_replaced(
    pool: Pool, tmp_path: Path
) -> None:
    pool.write("a")
    with gateway_command(pool.path, tmp_path, "--workers", "2") as command:
        until_ready(command)
        assert served_by(command) == {"a"}
        descriptors = len(list(Path(f"/proc/{command.process.pid}/fd").iterdir()))
        for number in range(60):
            pool.write("bc"[number % 2] + "a" * (number % 3 == 0))  # now and then it is read half written
            command.process.send_signal(signal.SIGHUP)
        pool.write("c")
        command.process.send_signal(signal.SIGHUP)
        until(lambda: served_by(command) == {"c"})
        until(lambda: len(list(Path(f"/proc/{command.process.pid}/fd").iterdir())) <= descriptors + 4)
        assert "Traceback" not in command.printed()
        until(lambda: 'backend="b"' not in command.get("/metrics").text)
        for victim in [pid for pid in family(command.process.pid) if b"spawn_main" in command_line(pid)]:
            os.kill(victim, signal.SIGKILL)
        until(lambda: command.printed().count("restarting it") == 2)
        until_ready(command)
        until(lambda: served_by(command) == {"c"})
        assert command.end() == 0


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.slow
def test_a_watched_file_is_reloaded_when_a_link_to_it_changes(pool: Pool, tmp_path: Path) -> None:
    pool.write("a", watch=True)
    link = tmp_path / "linked.yaml"
    link.symlink_to(pool.path)
    with gateway_command(link, tmp_path) as command:
        assert served_by(command) == {"a"}
        pool.path = tmp_path / "next.yaml"
        pool.write("b", watch=True)
        replacement = tmp_path / "replacement"
        replacement.symlink_to(pool.path)
        replacement.replace(link)
        until(lambda: served_by(command, 2) == {"b"})
        assert "reload (file): 2 changes" in command.printed()
        assert "nothing has changed" not in command.printed()
