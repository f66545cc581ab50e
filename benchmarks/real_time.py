"""Measure how precisely one simulator process keeps its step times in real time: `python -m benchmarks.real_time`.

Eight replicas (two each of baseline, n-gram, suffix and EAGLE-3) run in one process, and STREAMS chat streams load them
in a closed loop. The process itself reports the time from the scheduled end of each engine step until its last chunk
was sent (`simulator:step_lateness_seconds` on its `/metrics`).
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
        process.stdout.readline()  # written once all replicas listen
        yield ports, process.pid
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


class _Stream:
    """A client stream that starts the next request when an answer has ended."""

    def __init__(self, client: UpstreamClient, number: int, tokens: int, counts: Counter[str]) -> None:
        self._client = client
        self._number = number
        self._tokens = tokens
        self._counts = counts
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
        self._counts[f"status {status}"] += 1

    def on_data(self, data: bytes) -> None:
        self._counts["chunks"] += data.count(b"\n\n")

    def on_end(self) -> None:
        self.begin()

    def on_error(self, error: UpstreamError) -> None:
        self._counts[error.kind] += 1


@dataclass(frozen=True, slots=True)
class _Measurement:
    """Result of a measurement: late steps by bound in seconds, received events, and CPU use of the simulator.

    Parameters
    ----------
    cpu_s, waited_s
        Seconds of CPU time, and seconds during which its event loop was ready but had no core.
    """

    late: dict[float, float]
    counts: Counter[str]
    elapsed_s: float
    cpu_s: float
    waited_s: float


async def _run(ports: list[int], pid: int, streams: int, seconds: float, warm_s: float) -> _Measurement:
    counts: Counter[str] = Counter()
    clients = [UpstreamClient(Address.parse(f"http://127.0.0.1:{port}")) for port in ports]
    held = []
    for number in range(streams):  # spread out: bursts of arrivals are not measured here
        held.append(_Stream(clients[number % len(clients)], number, 400 + number % 7 * 50, counts))
        await asyncio.sleep(warm_s / streams)
    before = await _lateness(ports)
    counts.clear()
    cpu_s, waited_s, began_s = _cpu_s(pid), _waited_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    cpu_s, waited_s, elapsed_s = _cpu_s(pid) - cpu_s, _waited_s(pid) - waited_s, time.monotonic() - began_s
    counts = counts.copy()
    after = await _lateness(ports)
    return _Measurement({bound: after[bound] - before[bound] for bound in after}, counts, elapsed_s, cpu_s, waited_s)


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
    """Run the measurement and print how late the steps were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument(
        "--method", choices=[name for name, _ in _METHODS], help="of all replicas; default: all methods in turn"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-seconds", type=float, default=8.0, help="before the measurement, while streams start")
    arguments = parser.parse_args()
    with _simulator(arguments.replicas, arguments.method) as (ports, pid):
        measured = uvloop.run(_run(ports, pid, arguments.streams, arguments.seconds, arguments.warm_seconds))
    total, counts, elapsed_s = measured.late[float("inf")], measured.counts, measured.elapsed_s
    print(
        f"{arguments.replicas} replicas, {arguments.streams} streams, {arguments.seconds:g} s:"
        f" {total:.0f} steps, {dict(counts)}"
    )
    print(
        f"CPU of the process: {measured.cpu_s / elapsed_s:.0%} of a core,"
        f" {measured.cpu_s / counts['chunks'] * 1e6:.1f} us per chunk; its event loop waited for a core"
        f" {measured.waited_s / elapsed_s:.0%} of the time"
        f" (load {os.getloadavg()[0]:.1f})"
    )
    for bound, count in sorted(measured.late.items()):
        print(f"  at most {bound * 1e3:7.2f} ms late: {count / total:7.2%}")


if __name__ == "__main__":
    main()
