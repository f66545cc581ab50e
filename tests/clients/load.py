"""A run of a load tool, and its figures beside the gateway's own counters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.clients.report import URL, check

REQUESTS, STREAMS = 40, 4
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
TOKENIZER = os.environ.get("CLIENTS_TOKENIZER", "")
"""A folder with a tokenizer; nothing can be fetched."""

_NEAR = 1.5
_SLACK_MS = 20.0  # a client's own time, on a busy machine
_SAMPLE = re.compile(r"^(gateway_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Totals:
    """What the gateway has counted, over all backends; times are sums in seconds.

    Parameters
    ----------
    ok, other
        Requests by their outcome.
    """

    ok: int
    other: int
    output_tokens: int
    ttft_s: float
    ttft_count: int
    tpot_s: float
    tpot_count: int

    def since(self, before: Totals) -> Totals:
        """Return the difference to an earlier reading."""
        return Totals(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))

    @property
    def ttft_ms(self) -> float:
        """Mean time to the first token."""
        return 1000 * self.ttft_s / self.ttft_count

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first."""
        return 1000 * self.tpot_s / self.tpot_count


@dataclass(frozen=True)
class Figures:
    """What a tool reports of its run."""

    requests: int
    failed: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float


def totals(url: str = URL) -> Totals:
    """Read the gateway's counters."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/metrics") as page:
        samples = _SAMPLE.findall(page.read().decode())

    def total(name: str, holds: Callable[[str], bool] = lambda labels: True) -> float:
        return sum(float(value) for found, labels, value in samples if found == name and holds(labels))

    return Totals(
        ok=int(total("gateway_requests_total", lambda labels: 'outcome="ok"' in labels)),
        other=int(total("gateway_requests_total", lambda labels: 'outcome="ok"' not in labels)),
        output_tokens=int(total("gateway_output_tokens_total")),
        ttft_s=total("gateway_ttft_seconds_sum"),
        ttft_count=int(total("gateway_ttft_seconds_count")),
        tpot_s=total("gateway_tpot_seconds_sum"),
        tpot_count=int(total("gateway_tpot_seconds_count")),
    )


class Run:
    """A run of a load tool, and the cases that look at it.

    Parameters
    ----------
    measure
        Runs the tool, and returns what it reports.
    refused
        Requests besides those that it reports that are refused, because the tool sends no key with them.
    """

    def __init__(self, measure: Callable[[Path], Figures], refused: int = 0) -> None:
        self._measure = measure
        self._refused = refused
        self._figures: Figures | None = None
        self._counted: Totals | None = None

    def completes(self) -> str:
        """Check that every request succeeded, as the tool and the gateway see it."""
        before = totals()
        with tempfile.TemporaryDirectory() as folder:
            self._figures = self._measure(Path(folder))
        self._counted = totals().since(before)
        check((self._figures.requests, self._figures.failed) == (REQUESTS, 0), self._figures)
        check((self._counted.ok, self._counted.other) == (REQUESTS, self._refused), self._counted)
        return f"{self._figures.requests} requests; the gateway counted {self._counted.ok}"

    def tokens(self) -> str:
        """Check that the tool has received the tokens that the gateway has counted."""
        reported, counted = self._of_run()
        # A tool that counts by tokenizing the text may find a token more or less in it.
        check(abs(reported.output_tokens - counted.output_tokens) <= REQUESTS // 10, (reported, counted))
        return f"{reported.output_tokens} output tokens; the gateway counted {counted.output_tokens}"

    def times(self) -> str:
        """Check that the tool's mean times are near the gateway's."""
        reported, counted = self._of_run()
        for own, ours in ((reported.ttft_ms, counted.ttft_ms), (reported.tpot_ms, counted.tpot_ms)):
            check(ours / _NEAR - _SLACK_MS <= own <= ours * _NEAR + _SLACK_MS, (reported, counted))
        return (
            f"TTFT {reported.ttft_ms:.1f} ms (gateway {counted.ttft_ms:.1f} ms), "
            f"TPOT {reported.tpot_ms:.2f} ms (gateway {counted.tpot_ms:.2f} ms)"
        )

    @property
    def cases(self) -> dict[str, Callable[[], str]]:
        """The cases by name."""
        return {"completes": self.completes, "tokens": self.tokens, "times": self.times}

    def _of_run(self) -> tuple[Figures, Totals]:
        check(self._figures is not None and self._counted is not None, "the run failed")
        assert self._figures is not None
        assert self._counted is not None
        return self._figures, self._counted


def run_tool(name: str, *arguments: object) -> None:
    """Run a command of this environment, its output on stderr."""
    command = [str(Path(sys.executable).parent / name), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=sys.stderr, stderr=sys.stderr, timeout=240)
