"""How well one simulator process keeps to its model in real time: `python -m benchmarks.real_time`.

Eight replicas (two of each of baseline, n-gram, suffix, EAGLE-3) in one process, STREAMS chat streams in a closed loop
over all of them; the process itself tells how late each engine step's last chunk left, compared with the end that the
model gave the step (`simulator:step_lateness_seconds` on its `/metrics`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import uvloop

from backends.http.client import Address, Call, HeaderList, UpstreamClient, UpstreamError, request_head
from backends.launch.ports import free_port

_METHODS: tuple[tuple[str, dict[str, int]], ...] = (
    ("baseline", {}),
    ("ngram", {"num_speculative_tokens": 5, "prompt_lookup_max": 4}),
    ("suffix", {}),
    ("eagle3", {"num_speculative_tokens": 3}),
)
_BUCKET = re.compile(r'simulator:step_lateness_seconds_bucket\{.*le="([^"]+)".*\} ([0-9.e+]+)')


@contextlib.contextmanager
def _simulator(replicas: int, method: str | None) -> Iterator[tuple[list[int], int]]:
    ports = [free_port() for _ in range(replicas)]
    methods = [each for each in _METHODS if method in {None, each[0]}]
    document = {
        "replicas": [
            {
                "name": f"r{number}",
                "model": "m",
                "method": methods[number % len(methods)][0],
                "speculative_config": methods[number % len(methods)][1],
                "calibration": "llama-3.1-8b-h100",
                "host": "127.0.0.1",
                "port": port,
            }
            for number, port in enumerate(ports)
        ]
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "backends.simulator"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(document))
        process.stdin.close()
        process.stdout.readline()  # says that all listen
        yield ports, process.pid
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


class _Stream:
    """Reads one answer and begins the next."""

    def __init__(self, client: UpstreamClient, number: int, tokens: int, seen: Counter[str]) -> None:
        self._client = client
        self._number = number
        self._tokens = tokens
        self._seen = seen
        self._call: Call | None = None
        self.begin()

    def begin(self) -> None:
        words = " ".join(f"item {self._number * 31 + word * word % 97}" for word in range(60))
        body = json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": f"List these again: {words}"}],
                "max_tokens": self._tokens,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0.7,
                "seed": self._number,
            }
        ).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(body)).encode()))
        self._call = self._client.send(request_head(b"POST", b"/v1/chat/completions", headers), body, self)

    def on_head(self, status: int, headers: HeaderList) -> None:
        self._seen[f"status {status}"] += 1

    def on_data(self, data: bytes) -> None:
        self._seen["chunks"] += data.count(b"\n\n")

    def on_end(self) -> None:
        self.begin()

    def on_error(self, error: UpstreamError) -> None:
        self._seen[error.kind] += 1


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was seen in the measured time: late steps by bound in seconds, and what the process took.

    Parameters
    ----------
    cpu_s, waited_s
        Seconds that the process computed, and that its event loop was ready to but had no core.
    """

    late: dict[float, float]
    seen: Counter[str]
    elapsed_s: float
    cpu_s: float
    waited_s: float


async def _run(ports: list[int], pid: int, streams: int, seconds: float, warm_s: float) -> _Measured:
    seen: Counter[str] = Counter()
    clients = [UpstreamClient(Address.parse(f"http://127.0.0.1:{port}")) for port in ports]
    held = []
    for number in range(streams):  # not all at once: a burst of arrivals is another question
        held.append(_Stream(clients[number % len(clients)], number, 400 + number % 7 * 50, seen))
        await asyncio.sleep(warm_s / streams)
    before = await _lateness(ports)
    seen.clear()
    cpu_s, waited_s, began_s = _cpu_s(pid), _waited_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    cpu_s, waited_s, elapsed_s = _cpu_s(pid) - cpu_s, _waited_s(pid) - waited_s, time.monotonic() - began_s
    seen = seen.copy()
    after = await _lateness(ports)
    return _Measured({bound: after[bound] - before[bound] for bound in after}, seen, elapsed_s, cpu_s, waited_s)


async def _lateness(ports: list[int]) -> dict[float, float]:
    counts: dict[float, float] = {}
    async with httpx.AsyncClient(trust_env=False) as client:
        for port in ports:
            page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            for bound, count in _BUCKET.findall(page):
                counts[float(bound)] = counts.get(float(bound), 0.0) + float(count)
    return counts


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def _waited_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat", encoding="utf-8") as schedstat:
        return int(schedstat.read().split()[1]) / 1e9


def main() -> None:
    """Run it and print how late the steps were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--method", choices=[name for name, _ in _METHODS], help="of all replicas; default: in turn")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-seconds", type=float, default=8.0, help="before measuring, in which streams begin")
    given = parser.parse_args()
    with _simulator(given.replicas, given.method) as (ports, pid):
        measured = uvloop.run(_run(ports, pid, given.streams, given.seconds, given.warm_seconds))
    total, seen, elapsed_s = measured.late[float("inf")], measured.seen, measured.elapsed_s
    print(f"{given.replicas} replicas, {given.streams} streams, {given.seconds:g} s: {total:.0f} steps, {dict(seen)}")
    print(
        f"CPU of the process: {measured.cpu_s / elapsed_s:.0%} of a core,"
        f" {measured.cpu_s / seen['chunks'] * 1e6:.1f} us a chunk; its event loop waited for a core"
        f" {measured.waited_s / elapsed_s:.0%} of the time"
        f" (load {os.getloadavg()[0]:.1f})"
    )
    for bound, count in sorted(measured.late.items()):
        print(f"  at most {bound * 1e3:7.2f} ms late: {count / total:7.2%}")


if __name__ == "__main__":
    main()
