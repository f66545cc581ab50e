"""Holds requests that arrive before any replica of their model has been up, in place of a 503."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Final

from backends import background
from backends.backend import Backend
from backends.health import State
from gateway.relay.roles import Waiter

logger = logging.getLogger(__name__)

LONGEST_S: Final = 120.0
_MOST: Final = 256
_MOST_BYTES: Final = 64 << 20


class FirstStart:
    """The requests that wait for the first replica of a model, until one has been up."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[Waiter, float]]] = {}  # requests and when they began to wait, by model
        self._started: set[str] = set()  # models that have had a replica up

    def hold(self, waiter: Waiter, model: str) -> bool:
        """Hold a request that no replica can take yet; return whether it waits."""
        if model in self._started or all(each.health.state is not State.STARTING for each in waiter.members()):
            return False
        waiting = [(each, since_s) for each, since_s in self._waiting.get(model, ()) if each.is_open]
        held = sum(len(each.body) for each, _ in waiting) + len(waiter.body)
        if len(waiting) >= _MOST or held > _MOST_BYTES:
            return False
        if not waiting:
            logger.info("%s: requests wait for its first replica, for at most %.0f s", model, LONGEST_S)
        self._waiting[model] = [*waiting, (waiter, time.perf_counter())]
        return True

    def ready(self, backend: Backend) -> None:
        """Send the waiting requests of a model, since one of its replicas is up."""
        self._started.add(backend.model)
        _send(self._waiting.pop(backend.model, ()), time.perf_counter())

    def end_overdue(self, now_s: float) -> None:
        """Send the requests whose wait is over, or answer why they cannot be sent."""
        for model, waiting in list(self._waiting.items()):
            self._waiting[model] = [each for each in waiting if now_s - each[1] < LONGEST_S]
            _send([each for each in waiting if now_s - each[1] >= LONGEST_S], now_s)


def _send(waiting: Iterable[tuple[Waiter, float]], now_s: float) -> None:
    for waiter, since_s in waiting:
        with background.guarded("requests"):
            if waiter.is_open:
                waiter.take_turn(now_s - since_s)
