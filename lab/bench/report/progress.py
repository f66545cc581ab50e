"""Progress of a benchmark on the terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lab.bench.record import Record
from lab.bench.report.results import Run
from lab.bench.targets import Target
from lab.bench.workload import Load

_DRAW_EVERY_S = 0.5


class RequestBar:
    """A progress bar of requests with the remaining time; shows nothing without a terminal.

    The event loop draws it twice a second: a drawing thread could take the interpreter at any moment and disturb the
    times of the chunks.
    """

    def __init__(self, console: Console) -> None:
        self._failed = 0
        self._size: int | None = None
        self._ended = 0
        self._share: Callable[[int], float] = lambda _ended: 0.0
        self._task: TaskID | None = None
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

    def start(self, label: str, size: int | None, share: Callable[[int], float]) -> None:
        """Show the bar; `share` returns the share done, 0 to 1, from the number of requests that have ended."""
        self._failed = self._ended = 0
        self._size, self._share = size, share
        self._bar.start()
        self._task = self._bar.add_task(label, total=1.0, requests="")
        self._draw()

    def advance(self, record: Record) -> None:
        """Count a request that ended."""
        self._ended += 1
        self._failed += record.error is not None

    def stop(self) -> None:
        """Remove the bar."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._bar.stop()

    def _draw(self) -> None:
        if self._task is None:
            return
        requests = f"{self._ended}" + (f"/{self._size}" if self._size else "") + " requests"
        if self._failed:
            requests += f", {self._failed} failed"
        self._bar.update(self._task, completed=min(1.0, self._share(self._ended)), requests=requests)
        self._bar.refresh()
        self._timer = asyncio.get_running_loop().call_later(_DRAW_EVERY_S, self._draw)


class TerminalWatcher:
    """Shows a progress bar for each run on a terminal, and prints a line for each finished run."""

    def __init__(self, console: Console, runs: int, duration_s: float | None) -> None:
        self._console = console
        self._runs = runs  # total number of runs
        self._duration_s = duration_s  # maximum seconds of a run; None if only the number of requests limits it
        self._started = 0
        self._bar = RequestBar(console)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False)

    def begin(self, target: Target, load: Load, temperature: float | None, size: int | None) -> None:
        """Show the bar of a new run."""
        self._started += 1
        label = f"{self._started}/{self._runs} {target.name}, {load}"
        if temperature is not None:
            label += f", T={temperature:g}"
        begun_s = time.monotonic()

        def share(ended: int) -> float:
            shares = [ended / size] if size else []
            if self._duration_s is not None:
                shares.append((time.monotonic() - begun_s) / self._duration_s)
            return max(shares, default=0.0)

        self._bar.start(label, size, share)

    def advance(self, record: Record) -> None:
        """Count a request that ended."""
        self._bar.advance(record)

    def end(self, run: Run) -> None:
        """Remove the bar and print the result of the run."""
        self._bar.stop()
        temperature = "" if run.temperature is None else f", T={run.temperature:g}"
        failed = f", {run.failed} failed" if run.failed else ""
        self.say(
            f"{self._started}/{self._runs} {run.target}, {run.load}{temperature}: {run.completed} requests"
            f"{failed} in {run.duration_s:.1f} s, {run.output_tokens_per_s:.1f} tokens/s"
        )

    def close(self) -> None:
        """Restore the terminal."""
        self._bar.stop()
