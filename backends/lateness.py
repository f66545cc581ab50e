"""How late the event loop is: what passes then is not the time of whoever is waited for."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Final, Self

_TICK_S: Final = 0.05


class Lateness:
    """Measures, while it is entered, for how long the event loop was kept busy at a stretch."""

    def __init__(self) -> None:
        self.longest_s = 0.0  # most seconds by which a timer every 50 ms was late
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._measure()

    def _wait(self) -> None:
        self._due_s = time.monotonic() + _TICK_S
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._measure()
        self._wait()

    def _measure(self) -> None:
        self.longest_s = max(self.longest_s, time.monotonic() - self._due_s)
