"""The tables of docs/metrics.md: type, labels and meaning of each series, as the code declares them."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from gateway.config.pool_file import PoolFile
from gateway.reload.series import BesideSeries
from gateway.service.app import refresh
from gateway.service.assembly import assemble
from scripts.reference.tables import cell

_ROW = re.compile(r"^\| `(gateway_\w+)` \|.*\n", re.MULTILINE)
_LAST = "\n## Traces\n"
_NOWHERE = Path("/dev/null/gateway")
_ALL = {  # with everything that has series of its own
    "models": {"m": {"policy": {"name": "learned"}, "backends": {"b": {"method": "baseline", "url": "http://b"}}}},
    "batches": {"folder": str(_NOWHERE)},
    "recorder": {"path": str(_NOWHERE)},
    "telemetry": {"access_log": 1.0},
    "state": {"file": str(_NOWHERE)},
    "dashboard": {"enabled": False},  # it would read the counters, in a task
}


def metrics_page(page: str) -> str:
    """Return the page with the rows that the code has: a new one for a new series, none for one that is gone.

    The page groups the series and explains their labels. New rows go into a section of their own, until they are moved.
    """
    rows = _rows()
    page = _ROW.sub(lambda row: rows.pop(row[1], ""), page)
    if rows:
        head = "| series | type | labels | meaning |\n|---|---|---|---|\n"
        page = page.replace(_LAST, f"\n## Others\n\n{head}{''.join(rows.values())}{_LAST}")
    return page


def declared() -> list[Counter | Gauge | Histogram]:
    """Return all series that a gateway process may have."""
    gateway = assemble(PoolFile.model_validate(_ALL), [], b"")
    refresh(gateway)
    BesideSeries(gateway.metrics, gateway.rooms)
    return gateway.metrics.declared


def _rows() -> dict[str, str]:
    rows = {}
    for metric in declared():
        (described,) = metric.describe()
        name = described.name + ("_total" if described.type == "counter" else "")
        cells = [
            f"`{name}`",
            described.type,
            ", ".join(metric._labelnames).replace("model, backend, method", "*replica*"),
            cell(described.documentation),
        ]
        rows[name] = f"| {' | '.join(cells)} |\n".replace("|  |", "| |")
    return rows
