"""The progress bar on a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from lab.live.progress import RequestBar
from lab.live.record import Record


async def test_the_bar_shows_finished_and_failed_requests_and_the_time_left() -> None:
    seen = StringIO()
    bar = RequestBar(Console(file=seen, force_terminal=True, width=120), "an endpoint", 2, 10.0)
    bar.start()
    assert "0/2 requests" in seen.getvalue()
    bar.advance(Record(0, 0.0))
    bar.advance(Record(1, 0.0, error="connect"))
    bar._draw()
    bar.stop()
    shown = seen.getvalue()
    for part in ("an endpoint", "100%", "2/2 requests, 1 failed", "left"):
        assert part in shown


async def test_without_a_terminal_there_is_no_bar() -> None:
    seen = StringIO()
    bar = RequestBar(Console(file=seen), "an endpoint", 2, 10.0)
    bar.start()
    bar.advance(Record(0, 0.0))
    bar.stop()
    assert seen.getvalue() == ""
