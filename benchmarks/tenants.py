"""Measure what tenants of a client's choosing cost: `python -m benchmarks.tenants`.

One key names a tenant by a header, in the process and without sockets (`benchmarks.overhead.inside`), before two
backends that take 8 requests each. `answered`: 64 connections, of which 48 wait at any time, send one request after
another. `left`: each request waits, and its client leaves. Prints the microseconds of one thread per request with one
tenant, and with a new one each time, and the memory that so many tenants leave behind.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.load import chat_body
from benchmarks.overhead.inside import Inside, NullTransport, answer_of, request_of
from benchmarks.process import rss_mb
from benchmarks.table import head, row
from gateway.config.load import load_pool

POOL = """\
models:
  m:
    policy: {name: least_loaded}
    queue: {max_in_flight_per_backend: 8, max_waiting: 5000, max_wait_s: 36000}
    backends: {a: "http://127.0.0.1:1", b: "http://127.0.0.1:2"}
keys: [{name: app, key: sk-bench, tenant_header: x-tenant}]
timeouts: {keep_alive_s: 36000, first_byte_s: 36000}
state: none
"""
PLACES, WAITING, SWEEP = 16, 48, 1000


class Client(NullTransport):
    """A connection of a client, which is ready for its next request once one was answered."""

    def __init__(self, inside: Inside, ready: deque[Client]) -> None:
        super().__init__()
        self._ready = ready
        self.connection = inside.client(self)

    def write(self, data: Any) -> None:
        self._ready.append(self)


class Load:
    """Requests to one gateway."""

    def __init__(self, pool: Path, *, is_new: bool) -> None:
        self._inside = Inside(load_pool(pool), PLACES // 2 + 1)  # the next is sent before the one that ends has left
        self._is_new, self._number = is_new, 0
        self._ready: deque[Client] = deque()
        self._body, self._answer = chat_body(2000, 0, stream=False), answer_of()
        for _ in range(PLACES + WAITING):
            self._send(Client(self._inside, self._ready))
        self._inside.writes.flush()

    def _send(self, client: Client) -> None:
        """Send the next request of a client."""
        self._number += 1
        tenant = b"x-number: %d\r\nx-tenant: tenant-%d\r\n" % (self._number, self._number if self._is_new else 1)
        client.connection.data_received(request_of(self._body, tenant))
        if self._number % SWEEP == 0:  # each half second, at 2,000 a second
            self._inside.gateway.relay.sweep()

    def answered(self) -> None:
        """Answer the oldest request, and send the next one of its client."""
        self._inside.carried.popleft().data_received(self._answer)
        self._inside.writes.flush()
        self._send(self._ready.popleft())
        self._inside.writes.flush()

    def left(self) -> None:
        """Send a request that waits, and leave."""
        client = Client(self._inside, self._ready)
        self._send(client)
        client.connection.connection_lost(None)


async def measure(pool: Path, way: str, number: int) -> None:
    """Print a row."""
    cells = []
    for is_new in (False, True):
        load = Load(pool, is_new=is_new)
        act, rounds = getattr(load, way), list[float]()
        for _ in range(2000):
            act()
        gc.collect()
        before_mb = rss_mb([os.getpid()])
        for _ in range(max(1, number // 5000)):
            begun_s = time.thread_time()
            for _ in range(5000):
                act()
            rounds.append((time.thread_time() - begun_s) / 5000)
        gc.collect()
        cells.append((1e6 * min(rounds), rss_mb([os.getpid()]) - before_mb))
    (one_us, one_mb), (new_us, new_mb) = cells
    ratio = f"{new_us / one_us:.2f}"
    print(row(way, f"{one_us:.0f}", f"{new_us:.0f}", ratio, f"{one_mb:.1f}", f"{new_mb:.1f}"), flush=True)


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--way", nargs="*", choices=("answered", "left"), default=["answered", "left"])
    options = parser.parse_args()
    print(head("requests", "one tenant, us", "new ones, us", "ratio", "one tenant, MB", "new ones, MB"))
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder, "pool.yaml")
        pool.write_text(POOL)
        for way in options.way:
            uvloop.run(measure(pool, way, options.requests))


if __name__ == "__main__":
    main()
