"""The tables of docs/metrics.md: type, labels and meaning of each series, as the code registers them."""

from __future__ import annotations

import re

from prometheus_client.metrics import MetricWrapperBase

from gateway.telemetry.metrics import Metrics
from scripts.reference.tables import cell

_ROW = re.compile(r"^\| `(gateway_\w+)` \|.*\n", re.MULTILINE)
_LAST = "\n## Traces\n"


def metrics_page(page: str) -> str:
    """Return the page with the rows that the code has: a new one for a new series, none for one that is gone.

    The page groups the series and explains their labels. New rows go into a section of their own, until they are moved.
    """
    rows = _rows()
    page = _ROW.sub(lambda row: rows.pop(row[1], ""), page)
    if rows:
        head = "| series | type | labels | meaning |\n| --- | --- | --- | --- |\n"
        page = page.replace(_LAST, f"\n## Others\n\n{head}{''.join(rows.values())}{_LAST}")
    return page


def _rows() -> dict[str, str]:
    rows = {}
    for metric in Metrics().registry._collector_to_names:
        if isinstance(metric, MetricWrapperBase):
            (described,) = metric.describe()
            name = described.name + ("_total" if described.type == "counter" else "")
            cells = [f"`{name}`", described.type, ", ".join(metric._labelnames), cell(described.documentation)]
            rows[name] = f"| {' | '.join(cells)} |\n".replace("|  |", "| |")
    return rows
