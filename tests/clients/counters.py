"""What the gateway has counted of the requests of a client."""

from __future__ import annotations

import re
import urllib.request
from typing import NamedTuple

from tests.clients.report import URL

_SAMPLE = re.compile(r"^(gateway_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Totals(NamedTuple):
    """Requests by their outcome, and tokens, over all backends."""

    ok: int
    other: int
    output_tokens: int

    def since(self, before: Totals) -> Totals:
        """Return the difference to an earlier reading."""
        return Totals(*(now - then for now, then in zip(self, before, strict=True)))


def totals() -> Totals:
    """Read the gateway's counters."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{URL}/metrics") as page:
        samples = _SAMPLE.findall(page.read().decode())
    ended = [(labels, float(value)) for name, labels, value in samples if name == "gateway_requests_total"]
    ok = sum(value for labels, value in ended if 'outcome="ok"' in labels)
    tokens = sum(float(value) for name, _, value in samples if name == "gateway_output_tokens_total")
    return Totals(int(ok), int(sum(value for _, value in ended) - ok), int(tokens))
