"""A bounded queue of ended requests, and the thread that passes them on, so that no request waits for a collector."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from backends.background import Seldom
from gateway.rooms.reports.trail import Trail
from gateway.telemetry.log_format import place_of
from gateway.telemetry.registry import Registry

log = logging.getLogger(__name__)

_BATCH = 64
_PAUSE_S = 0.0005
_STOP_S = 3.0


class Sink(Protocol):
    """What takes the trails of ended requests, in a thread of its own."""

    signal: str  # what it makes of them, as a label

    def write(self, trails: Sequence[Trail]) -> bool:
        """Pass trails on; return whether that succeeded."""

    def close(self) -> None:
        """Free what it holds, and give up what it is waiting for."""


class Outlet:
    """The way of ended requests to a sink."""

    def __init__(self, sink: Sink, max_trails: int, delay_s: float) -> None:
        self._sink = sink
        self._max_trails = max_trails  # most trails that wait; further ones are dropped
        self._delay_s = delay_s  # seconds after which a batch is passed on that is not full
        self._queue: deque[Trail] = deque()
        self._awake = threading.Event()
        self._stopping = self._gives_up = False
        self._thread = threading.Thread(target=self._run, name=f"telemetry {sink.signal}", daemon=True)
        # Since the start; `dropped` is counted by the event loop, the others by the thread.
        self._passed = {"sent": 0, "dropped": 0, "failed": 0}
        self._counted = self._passed.copy()
        self._logged = Seldom()

    def put(self, trail: Trail) -> None:
        """Append a trail, or drop it if too many wait."""
        waiting = len(self._queue)
        if waiting >= self._max_trails:
            self._passed["dropped"] += 1
            return
        self._queue.append(trail)
        if waiting == _BATCH:
            self._awake.set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Pass on the rest and end the thread; what a sink does not take within seconds is dropped."""
        self._stopping = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._gives_up = True
        self._sink.close()
        self._passed["dropped"] += len(self._queue)

    def count(self, registry: Registry) -> None:
        """Add the changes since the last call to the series; runs on the event loop."""
        requests = registry.counter("gateway_telemetry_requests")
        for result, passed in self._passed.items():
            requests.labels(self._sink.signal, result).inc(passed - self._counted[result])
            self._counted[result] = passed

    def _run(self) -> None:
        while not self._stopping:
            self._awake.wait(self._delay_s)
            self._awake.clear()
            while self._queue and not self._gives_up:
                self._pass_on([self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))])
                time.sleep(_PAUSE_S)  # releases the interpreter, for which the event loop would otherwise wait 5 ms

    def _pass_on(self, trails: list[Trail]) -> None:
        try:
            succeeded, why = self._sink.write(trails), "the collector does not take them"
        except Exception as error:  # noqa: BLE001 -- a defect in one batch must not end the thread
            succeeded, why = False, place_of(error)
        self._passed["sent" if succeeded else "failed"] += len(trails)
        if not succeeded and self._logged.may_say():
            log.warning(
                "%s are lost: %s (logged once a minute; gateway_telemetry_requests_total counts the requests)",
                self._sink.signal,
                why,
            )
