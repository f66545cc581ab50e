"""Traces in CSV: Azure's of 2023 and 2024, and BurstGPT's of versions 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from lab.trace.lines import BrokenLine, Report, TraceError, numbered_lines
from lab.trace.record import TraceRecord
from lab.trace.values import read_time

AZURE = {"time": "TIMESTAMP", "prompt": "ContextTokens", "output": "GeneratedTokens"}
BURSTGPT = {
    "time": "Timestamp",
    "prompt": "Request tokens",
    "output": "Response tokens",
    "model": "Model",
    "session": "Session ID",
    "log": "Log Type",
    "elapsed": "Elapsed time",
}
_NEEDED = ("time", "prompt", "output")
_WORKLOADS = {"code": "code", "conv": "chat"}  # parts of the names of Azure's files


class _Row(NamedTuple):
    number: int  # of the line
    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    others: Mapping[str, str]  # the other columns that the table has


def columns_of(line: bytes) -> list[str]:
    """Return the cells of a line; none of these tables quotes a comma.

    Examples
    --------
    >>> columns_of(b'TIMESTAMP,"ContextTokens"')
    ['TIMESTAMP', 'ContextTokens']
    """
    return [cell.strip() for cell in line.decode("utf-8-sig", "replace").replace('"', "").split(",")]


def is_table(columns: list[str], names: Mapping[str, str]) -> bool:
    """Return whether a table has the required columns among `names`."""
    return all(names[what] in columns for what in _NEEDED)


def read_azure(path: Path, report: Report) -> Iterator[TraceRecord]:
    """Read one of Azure's tables: TIMESTAMP, ContextTokens, GeneratedTokens.

    The workload is `code` or `chat` if the file's name has `_code` or `_conv`.
    """
    workload = next((kind for word, kind in _WORKLOADS.items() if f"_{word}" in path.name.lower()), "")
    for row in _rows(path, AZURE, report):
        yield TraceRecord(
            id=str(row.number),
            arrived_at=row.arrived_at,
            workload=workload,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
        )


def read_burstgpt(path: Path, report: Report) -> Iterator[TraceRecord]:
    """Read one of BurstGPT's tables. Requests without response tokens have failed.

    Version 2 also has sessions, and how long each request took. The workload is `chat` for conversations by `Log Type`,
    and unknown for API requests.
    """
    for row in _rows(path, BURSTGPT, report):
        others = row.others
        yield TraceRecord(
            id=str(row.number),
            arrived_at=row.arrived_at,
            model=others.get("model", ""),
            session=others.get("session", ""),
            workload="chat" if others.get("log", "").lower().startswith("conversation") else "",
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            error="" if row.output_tokens else "failed",
            e2e_s=_seconds(others.get("elapsed", "")),
        )


def _seconds(text: str) -> float | None:
    """Return a time, 0 or more; None for an empty or another text."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _rows(path: Path, names: Mapping[str, str], report: Report) -> Iterator[_Row]:
    lines = numbered_lines(path, report)
    columns = columns_of(next(lines, (0, b""))[1])
    if not is_table(columns, names):
        raise TraceError(f"{path}: its first line must name the columns {', '.join(names[what] for what in _NEEDED)}")
    time, prompt, output = (columns.index(names[what]) for what in _NEEDED)
    others = {what: columns.index(name) for what, name in names.items() if name in columns and what not in _NEEDED}
    for number, line in lines:
        cells = columns_of(line)
        try:
            row = _Row(
                number,
                read_time(cells[time]),
                int(cells[prompt]),
                int(cells[output]),
                {what: cells[at] for what, at in others.items()},
            )
        except (ValueError, IndexError):
            row = None
        if row is None or row.prompt_tokens < 0 or row.output_tokens < 0:
            report(BrokenLine(path, number, f"expected a time and two whole numbers: {','.join(cells)[:80]}"))
        else:
            yield row
