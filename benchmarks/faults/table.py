"""The results as Markdown: `python -m benchmarks.faults.table RESULTS.json`, that of the faults, or of the soak."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.load import SILENT
from benchmarks.faults.measure import Result
from benchmarks.faults.soak import Sample, Soak, summary

_OWN = "gateway"


def peers_table(results: Sequence[Result]) -> str:
    """Return what each system lost: a row a fault, a column a system.

    A cell has the lost requests and, by reason, how; failures that look like an answer are in bold.
    """
    by_place = {(result.fault, result.system): result for result in results}
    faults = list(dict.fromkeys(result.fault for result in results))
    systems = list(dict.fromkeys(result.system for result in results))
    lines = [f"| fault | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for fault in faults:
        cells = [_lost(by_place.get((fault, system))) for system in systems]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    totals = [[result for result in results if result.system == system] for system in systems]
    sums = [f"{sum(each.lost for each in own)} of {sum(each.sent for each in own)}" for own in totals]
    silent = [f"{sum(each.silent for each in own)}" for own in totals]
    lines.append(f"| **lost in all** | {' | '.join(sums)} |")
    return "\n".join([*lines, f"| **of these unnoticed** | {' | '.join(silent)} |"])


def own_table(results: Sequence[Result]) -> str:
    """Return all figures of the gateway, a row a fault."""
    columns = (
        "fault", "sent", "answered", "left", "failed", "sent twice", "run twice", "longest answer", "failures over",
        "replica back after", "idle after", "MB before → after", "orphans",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for each in results:
        if not each.system.startswith(_OWN):
            continue
        name = each.fault + each.system.removeprefix(_OWN)
        back = "never" if each.back_s is None else f"{each.back_s:.1f} s"
        idle = "**never**" if each.idle_s is None else f"{each.idle_s:.1f} s"
        cells = [
            name, each.sent, each.answered, each.left, _lost(each), each.sent_twice, each.run_twice,
            f"{each.longest_s:.1f} s", f"{each.failing_s:.1f} s", back, idle,
            f"{each.rss_before_mb:.0f} → {each.rss_after_mb:.0f}", each.orphans,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _lost(result: Result | None) -> str:
    if result is None:
        return ""
    reasons = [
        f"**{count} {what}**" if what in SILENT else f"{count} {what}" for what, count in sorted(result.failed.items())
    ]
    died = [] if result.is_alive else ["**died**"]
    return ", ".join([*died, *reasons]) or "0"


def main() -> None:
    """Print the tables."""
    read = json.loads(Path(sys.argv[1]).read_text())
    if isinstance(read, dict):
        tables = {"soak": summary(Soak(**read | {"samples": [Sample(**each) for each in read["samples"]]}))}
    else:
        results = [Result(**each) for each in read]
        tables = {"peers": peers_table(results), "gateway": own_table(results)}
    print("\n\n".join(tables.values()))


if __name__ == "__main__":
    main()
