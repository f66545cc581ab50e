"""The progress bar on a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from lab.bench.record import Record
from lab.bench.report.progress import RequestBar


async def test_the_bar_shows_finished_and_failed_requests_and_the_time_left() -> None:
    seen = StringIO()
    bar = RequestBar(Console(file=seen, force_terminal=True, width=120))
    bar.start("an endpoint", 4, lambda ended: ended / 4)
    assert "0/4 requests" in seen.getvalue()
    bar.advance(Record(0, 0.0))
    bar.advance(Record(1, 0.0, error="connect"))
    bar._draw()
    bar.stop()
    shown = seen.getvalue()
    for part in ("an endpoint", "50%", "2/4 requests, 1 failed", "left"):
        assert part in shown


async def test_without_a_terminal_there_is_no_bar() -> None:
    seen = StringIO()
    bar = RequestBar(Console(file=seen))
    bar.start("an endpoint", 4, lambda ended: ended / 4)
    bar.advance(Record(0, 0.0))
    bar.stop()
    assert seen.getvalue() == ""
