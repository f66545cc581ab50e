"""Processes under measurement: start them on cores of their own, and read the cost of their whole trees."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.metrics_page import total

SYSTEM_CPU, LOAD_CPU = 0, 1
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_START_S = 60.0
_COUNTED_S = 1.1  # a worker's counts appear on the metrics page after a second
_IDLE_S, _IDLE_SHARE = 0.5, 0.05
_PING = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'


def stat(pid: int) -> list[str]:
    """Return the fields of a process after its name; none if it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    return stat(pid)[:1] not in ([], ["Z"])


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    pids, left = [pid], [pid]
    while left:
        more = children.get(left.pop(), [])
        pids += more
        left += more
    return pids


def cpu_s(pids: Iterable[int], *, waited: bool = False) -> float:
    """Return the user and system time of processes, all threads included; with `waited` that of ended children too."""
    return _TICK_S * sum(sum(map(int, stat(pid)[11 : 15 if waited else 13])) for pid in pids)


def rss_mb(pids: Iterable[int]) -> float:
    """Return the resident memory of processes in megabytes."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) / 1024
    return total


def most_files() -> int:
    """Return the largest number of files that a process may open here."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def raise_open_file_limit() -> None:
    """Raise the limit on open files to its maximum, for this process and those that it starts."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files(), most_files()))


def _prepare(cpus: set[int]) -> None:
    """Bind this process to the available ones of these cores, and raise its limit of open files."""
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus & available or available)
    raise_open_file_limit()


def spawned(argv: list[str], log: Path, env: Mapping[str, str] | None = None, **how: Any) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, whose output goes to a log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, stdout=output, stderr=output, env={**os.environ, **(env or {})}, start_new_session=True, **how
        )


@contextlib.contextmanager
def running(argv: list[str], cpus: set[int], log: Path, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run a process on these cores; terminate it and its children at the end."""
    process = spawned(argv, log, env, preexec_fn=lambda: _prepare(cpus))
    try:
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def upstream(port: int, folder: Path, env: Mapping[str, str], kind: str = "overhead") -> Iterator[int]:
    """Run an upstream, that of `benchmarks.overhead` or of `benchmarks.attacks`."""
    argv = [sys.executable, "-m", f"benchmarks.{kind}.upstream", str(port)]
    with running(argv, {LOAD_CPU}, folder / "upstream.log", env) as pid:
        for _ in _tries(lambda: f"the upstream does not answer:\n{(folder / 'upstream.log').read_text()[-2000:]}"):
            with contextlib.suppress(OSError):
                stats(port)
                break
        yield pid


def _tries(what: Callable[[], str]) -> Iterator[None]:
    """Yield for each try, and end the program with what is wrong if they take too long."""
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        yield
        time.sleep(0.1)
    raise SystemExit(what())


def stats(port: int) -> dict[str, int]:
    """Return the upstream's counters."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=10) as answer:
        counts: dict[str, int] = json.loads(answer.read())
    return counts


def load_command(port: int, connections: int, seconds: float, body_bytes: int, **options: object) -> list[str]:
    """Return the command that loads a port; `options` are more of those of `benchmarks.load.run`."""
    asked = {"port": port, "connections": connections, "seconds": seconds, "body_bytes": body_bytes, **options}
    return [sys.executable, "-m", "benchmarks.load", json.dumps(asked)]


def load(port: int, connections: int, seconds: float, body_bytes: int, **options: object) -> dict[str, object]:
    """Load a port (`benchmarks.load`) and return the results."""
    done = subprocess.run(
        load_command(port, connections, seconds, body_bytes, **options),
        capture_output=True,
        check=True,
        text=True,
        preexec_fn=lambda: _prepare({LOAD_CPU}),
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


def records_left_out(port: int) -> float:
    """Return how many requests a gateway dropped from its recording."""
    time.sleep(_COUNTED_S)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return total(answer.read().decode(), "gateway_recorder_records_total", result="dropped")


def until_answered(port: int, headers: tuple[str, ...], log: Path) -> None:
    """Wait until chat requests are answered: the proxy is up and considers its backends healthy."""
    fields = {"content-type": "application/json", **dict(header.split(": ", 1) for header in headers)}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data=_PING, headers=fields)
    answered = 0
    for _ in _tries(lambda: f"chat requests are not answered on port {port}: see {log}"):
        with contextlib.suppress(OSError):
            while answered < 16:
                with urllib.request.urlopen(request, timeout=2) as answer:
                    answered += answer.status == 200
            return


def until_idle(pid: int) -> None:
    """Wait until a process and its children have finished starting up, so that only steady state is measured."""
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        pids = tree(pid)
        began_s = cpu_s(pids)
        time.sleep(_IDLE_S)
        if cpu_s(pids) - began_s <= _IDLE_SHARE * _IDLE_S:
            return
    raise SystemExit(f"process {pid} is still busy {_START_S:g} s after its first answer")
