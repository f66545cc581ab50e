"""Progress of a run on the terminal."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lab.live.record import Record

_DRAW_EVERY_S = 0.5


class RequestBar:
    """A progress bar of requests with the remaining time; shows nothing without a terminal.

    The event loop draws it twice a second: a drawing thread could take the interpreter at any moment and disturb the
    times of the chunks.
    """

    def __init__(self, console: Console, label: str, size: int, duration_s: float) -> None:
        self._size = size
        self._duration_s = duration_s
        self._begun_s = time.monotonic()
        self._ended = self._failed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[requests]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=1.0, requests="")

    def start(self) -> None:
        """Show the bar."""
        self._bar.start()
        self._draw()

    def advance(self, record: Record) -> None:
        """Count a request that ended."""
        self._ended += 1
        self._failed += record.error is not None

    def stop(self) -> None:
        """Remove the bar."""
        if self._timer is not None:
            self._timer.cancel()
        self._bar.remove_task(self._task)
        self._bar.stop()

    def _draw(self) -> None:
        requests = f"{self._ended}/{self._size} requests" + (f", {self._failed} failed" if self._failed else "")
        self._bar.update(self._task, completed=self._share(), requests=requests)
        self._bar.refresh()
        self._timer = asyncio.get_running_loop().call_later(_DRAW_EVERY_S, self._draw)

    def _share(self) -> float:
        """Return the share of the time that has passed, since requests may come in bursts."""
        if self._ended == self._size:
            return 1.0
        passed_s = time.monotonic() - self._begun_s
        return min(passed_s / self._duration_s, 0.999) if self._duration_s else 0.999
