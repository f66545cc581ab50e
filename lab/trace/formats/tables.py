"""Traces in CSV: Azure's of 2023 and 2024, and BurstGPT's of versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lab.trace.formats.format import Format, Units
from lab.trace.lines import BrokenLine, Report, TraceError, numbered_lines
from lab.trace.record import TraceRecord
from lab.trace.values import read_count, read_not_negative, read_time

# Columns of each table: time, prompt tokens and output tokens.
_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}
_WORKLOADS = {"_code": "code", "_conv": "chat"}  # by parts of the names of Azure's files


def columns_of(line: bytes) -> list[str]:
    """Return the cells of a line; none of these tables quotes a comma.

    Examples
    --------
    >>> columns_of(b'TIMESTAMP,"ContextTokens"')
    ['TIMESTAMP', 'ContextTokens']
    """
    return [cell.strip() for cell in line.decode("utf-8", "replace").removeprefix("\ufeff").replace('"', "").split(",")]


def _read(kind: str, path: Path, report: Report, _: Units) -> Iterator[TraceRecord]:
    """Read a table of this kind.

    Azure's workload is `code` or `chat` if the file's name contains `_code` or `_conv`. BurstGPT's is `chat` for
    conversations by `Log Type`, and unknown for API requests; requests without response tokens failed. Version 2 also
    has sessions, and each request's duration.
    """
    lines = numbered_lines(path, report)
    columns, needed = columns_of(next(lines, (0, b""))[1]), _COLUMNS[kind]
    if not set(needed) <= set(columns):
        raise TraceError(f"{path}: its first line must name the columns {', '.join(needed)}")
    of_file = next((workload for part, workload in _WORKLOADS.items() if part in path.name.lower()), "")
    for number, line in lines:
        cells = columns_of(line)
        row = dict(zip(columns, cells, strict=False))
        is_chat = row.get("Log Type", "").lower().startswith("conversation")
        try:
            time, *sizes = (row[name] for name in needed)
            arrived_at, (prompt, output) = read_time(time), (read_count(int(size)) for size in sizes)
        except (ValueError, KeyError):
            report(BrokenLine(path, number, f"expected a time and two whole numbers: {','.join(cells)[:80]}"))
            continue
        yield TraceRecord(
            id=str(number),
            arrived_at=arrived_at,
            model=row.get("Model", ""),
            session=row.get("Session ID", ""),
            workload=of_file if kind == "azure" else "chat" if is_chat else "",
            prompt_tokens=prompt,
            output_tokens=output,
            error="failed" if kind == "burstgpt" and not output else "",
            e2e_s=_seconds(row.get("Elapsed time", "")),
        )


def _seconds(text: str) -> float | None:
    """Return a time, 0 or more; None for any other text."""
    try:
        return read_not_negative(float(text))
    except ValueError:
        return None


def _has(kind: str, columns: Mapping[str, Any]) -> bool:
    return columns.keys() >= set(_COLUMNS[kind])


AZURE, BURSTGPT = (Format(partial(_read, kind), partial(_has, kind)) for kind in _COLUMNS)
