"""Measure the exchange between gateways: `python -m benchmarks.peers [--gateways N] [--rate R] [--seconds S]`.

Starts a `redis-server`, and N processes with all that a gateway has of the exchange (`gateway.service.peer_exchange`),
but no HTTP: requests arrive at random, R per second in all, take a place at one of ten replicas for about a second, and
are charged to one of five keys with limits. Prints what the exchange costs Redis and each process, and the age of the
counts of other processes when a request arrives. The processes share a clock, as they run on one host.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import subprocess
import tempfile
import time
from random import Random
from typing import Any

import numpy as np
from redis import Redis, RedisError

from backends.backend import Backend
from backends.health import HealthRules
from backends.launch.ports import free_port
from backends.pool import Pool
from backends.speculation import Method
from gateway.dialects.errors import GatewayError
from gateway.relay.limits import Limits
from gateway.routing.keys import Client, Keyring
from gateway.routing.sticky import ResponseLocations
from gateway.service.peer_exchange import PeerExchange
from gateway.service.peers import Peers
from gateway.state.live_redis import LiveRedis
from gateway.state.store import ERRORS
from gateway.telemetry.metrics import Metrics

REPLICAS = 10
KEYS = 5
SERVICE_S = 1.0
WARMUP_S = 4.0
CLOCK = "http://clock"
"""A replica whose requests in flight are the milliseconds of the clock, to tell the age of a report."""


class Process:
    """A gateway process without HTTP."""

    def __init__(self, url: str, rate: float, seed: int) -> None:
        self.rng = Random(seed)
        self.rate = rate
        self.clients = [Client(f"team-{number}", requests_per_minute=60_000.0) for number in range(KEYS)]
        self.backends = [
            Backend(f"replica-{number}", "llama", Method.BASELINE, f"http://replica-{number}.example:8000")
            for number in range(REPLICAS)
        ]
        self.clock = Backend("clock", "llama", Method.BASELINE, CLOCK)
        self.limits = Limits()
        keyring = Keyring([(b"%d" % number, client) for number, client in enumerate(self.clients)])
        self.peers = Peers(Pool([*self.backends, self.clock], HealthRules()), self.limits, keyring, ResponseLocations())
        live = LiveRedis(url, "benchmark", self.peers.writer)
        self.exchange = PeerExchange(self.peers, live, Metrics().bind_peers("redis", ERRORS))
        self.ages_ms: list[int] = []
        self.peers_seen: list[int] = []

    async def run(self, seconds: float) -> dict[str, Any]:
        """Return the results of the time after the warm-up."""
        loop = asyncio.get_running_loop()
        update = self.peers.update

        def update_clock() -> None:
            self.clock.in_flight = int(1e3 * time.monotonic())
            update()

        self.peers.update = update_clock  # type: ignore[method-assign]
        self.exchange.start()
        began_s, cpu_s = time.monotonic(), 0.0
        while (passed_s := time.monotonic() - began_s) < WARMUP_S + seconds:
            await asyncio.sleep(self.rng.expovariate(self.rate))
            if passed_s > WARMUP_S:
                cpu_s = cpu_s or _cpu_s()
                self._sample()
            backend = self.backends[self.rng.randrange(REPLICAS)]
            client = self.clients[self.rng.randrange(KEYS)]
            with contextlib.suppress(GatewayError):
                self.limits.enter(client)
                backend.in_flight += 1
                loop.call_later(self.rng.expovariate(1.0 / SERVICE_S), self._end, backend, client)
        cpu_s = _cpu_s() - cpu_s
        await self.exchange.stop()
        return {"cpu_s": cpu_s, "ages_ms": self.ages_ms, "peers": min(self.peers_seen), "bytes": len(self.peers.report)}

    def _end(self, backend: Backend, client: Client) -> None:
        backend.in_flight -= 1
        self.limits.leave(client, 400)

    def _sample(self) -> None:
        now_ms = int(1e3 * time.monotonic())
        known = [peer.in_flight[CLOCK] for peer in self.peers._peers.values() if peer.counts]
        self.peers_seen.append(len(known))
        self.ages_ms += [now_ms - written_ms for written_ms in known]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _work(url: str, rate: float, seconds: float, seed: int, idle: bool, results: Any) -> None:
    process = Process(url, rate, seed)
    if idle:  # what the benchmark itself takes
        process.exchange.start = lambda: None  # type: ignore[method-assign]
        process.peers_seen.append(0)
    results.put(asyncio.run(process.run(seconds)))


def measure(gateways: int, rate: float, seconds: float, *, idle: bool = False) -> dict[str, float]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client: Any = Redis(port=port)
        try:
            while True:
                with contextlib.suppress(RedisError):
                    client.ping()
                    break
                time.sleep(0.05)
            context = multiprocessing.get_context("spawn")
            results: Any = context.Queue()
            url = f"redis://127.0.0.1:{port}/0"
            workers = [
                context.Process(target=_work, args=(url, rate / gateways, seconds, seed, idle, results))
                for seed in range(gateways)
            ]
            for worker in workers:
                worker.start()
            while client.hlen("benchmark:live") < gateways and not idle:
                time.sleep(0.1)
            time.sleep(WARMUP_S)
            before, before_s = client.info(), time.monotonic()
            time.sleep(0.8 * seconds)
            after, passed_s = client.info(), time.monotonic() - before_s
            found = [results.get() for _ in workers]
            for worker in workers:
                worker.join()
        finally:
            client.close()
            server.terminate()
            server.wait()

    def per_second(name: str) -> float:
        return float(after[name] - before[name]) / passed_s

    ages_ms = np.array([age for each in found for age in each["ages_ms"]] or [0])
    return {
        "commands/s": per_second("total_commands_processed"),
        "CPU of Redis": per_second("used_cpu_user") + per_second("used_cpu_sys"),
        "kB/s to Redis": 1e-3 * per_second("total_net_input_bytes"),
        "kB/s from Redis": 1e-3 * per_second("total_net_output_bytes"),
        "bytes of a report": float(np.mean([each["bytes"] for each in found])),
        "CPU of a process": float(np.mean([each["cpu_s"] for each in found])) / seconds,
        "fewest peers known": float(min(each["peers"] for each in found)),
        "age P50, ms": float(np.percentile(ages_ms, 50)),
        "age P99, ms": float(np.percentile(ages_ms, 99)),
        "age max, ms": float(ages_ms.max()),
    }


def main() -> None:
    """Measure with the exchange and without, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second, in all")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    runs = [measure(arguments.gateways, arguments.rate, arguments.seconds, idle=idle) for idle in (False, True)]
    print("| | with the exchange | without |\n|---|---|---|")
    for name in runs[0]:
        print(f"| {name} | {runs[0][name]:.4g} | {runs[1][name]:.4g} |")


if __name__ == "__main__":
    main()
