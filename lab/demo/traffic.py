"""The load of the demo: one phase after the other, each with its own share of chat and edits."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from random import Random

import numpy as np

from backends.http.client import Address
from lab.demo.requests import CHAT, EDITS
from lab.live.generator import INTERRUPTED, Generator, Request

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
        random, kinds = Random(seed), (CHAT, EDITS)
        due_s = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, round(2 * rate * seconds) + 20))
        due_s = due_s[due_s < seconds]

        def request(_: int) -> Request:
            kind = kinds[random.random() >= phase.chat_share]
            return Request(_PATH, kind.body(random), [(b"x-gateway-workload", kind.workload.encode())])

        # Sends them, and has their records.
        self.generator = Generator(address, request, due_s.tolist(), timeout_s=_TIMEOUT_S)

    async def run(self) -> None:
        """Send all requests when they are due, and wait for their answers."""
        try:
            await self.generator.run()
        except asyncio.CancelledError:
            self.generator.stop()
            raise

    def shares(self) -> dict[str, float]:
        """Return the share of the requests that each backend has answered, the largest first."""
        counts = Counter(record.backend for record in self.generator.records if record.backend)
        return {backend: count / counts.total() for backend, count in counts.most_common()}

    def failures(self) -> Counter[str]:
        """Return the number of requests that failed, by kind of failure."""
        return Counter(record.error for record in self.generator.records if record.error not in {None, INTERRUPTED})
