"""The load of the demo: one phase after the other, each with its own share of chat and edits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from backends.http.client import Address, UpstreamClient
from lab.bench.arrivals import gamma_arrivals
from lab.bench.generator import Generator, HttpSender, InFlightRequest
from lab.bench.record import Record
from lab.demo.requests import CHAT, EDITS

_PATH = "/v1/chat/completions"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the load."""

    name: str
    chat_share: float  # share of chat in the requests; the others are edits


PHASES = (Phase("chat at temperature 0.7", 0.9), Phase("code edits at temperature 0", 0.1))


class PhaseLoad:
    """The requests of one phase, at random times."""

    def __init__(self, address: Address, phase: Phase, rate: float, seconds: float, seed: int) -> None:
        random = Random(seed)
        self._due_s = gamma_arrivals(rate, 1.0, np.random.default_rng(seed), None, seconds)
        self._kinds = [CHAT if random.random() < phase.chat_share else EDITS for _ in self._due_s]
        self._client = UpstreamClient(address, max_idle=1000)
        self._senders = {
            kind: HttpSender(self._client, _PATH, [("x-gateway-workload", kind.workload)], _TIMEOUT_S)
            for kind in (CHAT, EDITS)
        }
        # Sends them, and has their records.
        self.generator = Generator(self, lambda index: self._kinds[index].body(random))

    def post(self, record: Record, body: bytes, on_end: Callable[[InFlightRequest], None]) -> InFlightRequest:
        """Send a request with the workload of its kind."""
        return self._senders[self._kinds[record.index]].post(record, body, on_end)

    async def run(self) -> None:
        """Send all requests when they are due, and wait for their answers."""
        try:
            await self.generator.open_loop(self._due_s)
        except asyncio.CancelledError:
            self.generator.stop()
            raise
        finally:
            self._client.close()

    def shares(self) -> dict[str, float]:
        """Return the share of the requests that each backend has answered, the largest first."""
        counts = Counter(record.backend for record in self.generator.records if record.backend)
        return {backend: count / counts.total() for backend, count in counts.most_common()}

    def failures(self) -> Counter[str]:
        """Return the number of requests that failed, by kind of failure."""
        return Counter(record.error for record in self.generator.records if record.error not in {None, "interrupted"})
