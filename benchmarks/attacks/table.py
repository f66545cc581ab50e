"""The results as one table: `python -m benchmarks.attacks.table RESULTS.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attacks.measure import Result


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table, a row an attack and a column a system.

    A cell has what became of the system unless it survived, requests that the bystander lost, its longest wait in
    seconds, the system's memory before and at its peak and, where connections are held, how many it had left open.
    """
    systems = list(dict.fromkeys(result.system for result in results))
    attacks = list(dict.fromkeys(result.attack for result in results))
    cells = {(result.attack, result.system): _cell(result) for result in results}
    lines = [f"| attack | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells.get((name, system), '') for system in systems)} |" for name in attacks]
    return "\n".join(lines)


def _cell(result: Result) -> str:
    parts = [] if result.verdict == "survived" else [f"**{result.verdict}**"]
    if result.lost:
        parts.append(f"lost {sum(result.lost.values())} of {result.requests}")
    parts.append(f"{result.worst_s:.2f} s")
    parts.append(f"{result.rss_before_mb:.0f} → {result.rss_peak_mb:.0f} MB")
    if result.held_s:
        parts.append(f"{result.held} open")
    if result.attack == "framing":
        parts.append(f"**{result.smuggled} smuggled**" if result.smuggled else "0 smuggled")
    return ", ".join(parts)


if __name__ == "__main__":
    print(table([Result(**result) for result in json.loads(Path(sys.argv[1]).read_text())]))
