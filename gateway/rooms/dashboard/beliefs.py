"""What the policy of a model believes, written anew in a thread from time to time while a dashboard is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import orjson

from backends.backend import Backend
from policies.build import learned_of
from policies.learned.belief import belief_of
from policies.learned.policy import Learned
from policies.policy import Policy

_PAUSE_S = 5.0
_MAX_CPU_SHARE = 0.001
"""Largest share of a core; what takes longer is done less often."""


class Beliefs:
    """The beliefs of a policy."""

    def __init__(self) -> None:
        self.json: bytes | None = None  # the last ones, as JSON; None if the policy has none
        self._seen: object = None
        self._next_s = 0.0

    async def update(self, policy: Policy, backends: Sequence[Backend]) -> None:
        """Write them anew if the policy has learned something, and the last time is long enough ago."""
        learned = learned_of(policy)
        if learned is None:
            self.json, self._seen = None, None
            return
        seen = learned, learned.statistics.observations, len(learned.known.replicas)
        if time.monotonic() < self._next_s or seen == self._seen:
            return
        self._seen = seen
        requests = [backend.in_flight + backend.load.others for backend in backends]
        batch = max(1.0, round(sum(requests) / len(requests), 1)) if requests else 1.0
        self.json, cpu_s = await asyncio.to_thread(_write, learned, list(backends), batch)
        self._next_s = time.monotonic() + max(_PAUSE_S, cpu_s / _MAX_CPU_SHARE)


def _write(learned: Learned, backends: list[Backend], batch: float) -> tuple[bytes, float]:
    """Return what a policy believes, as JSON, and the CPU seconds that this took."""
    began_s = time.thread_time()
    written = orjson.dumps(belief_of(learned, backends, batch))
    return written, time.thread_time() - began_s
