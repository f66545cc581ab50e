"""What the gateway has counted of the requests of a client."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from tests.clients.report import URL

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
