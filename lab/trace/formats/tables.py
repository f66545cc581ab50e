"""Traces in CSV: Azure's of 2023 and 2024, and BurstGPT's of versions 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.trace.duck import database, rows
from lab.trace.lines import BrokenLine, Report, TraceError, compression_of, numbered_lines, refuse
from lab.trace.record import TraceRecord

if TYPE_CHECKING:
    import duckdb

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

# Each line is read as one column and split here, so that line numbers are known; none of these tables quotes a comma.
_LINES = r"""
select string_split(replace(line, '"', ''), ',') as part
from read_csv(?, columns = {'line': 'VARCHAR'}, auto_detect = false, header = false, skip = 1, delim = '\x1f',
              quote = '', escape = '', comment = '', strict_mode = false, encoding = 'latin-1', compression = ?)
"""


def columns_of(line: bytes) -> list[str]:
    """Return the column names in the first line of a table.

    Examples
    --------
    >>> columns_of(b'TIMESTAMP,"ContextTokens"')
    ['TIMESTAMP', 'ContextTokens']
    """
    return [name.strip().strip('"') for name in line.decode("utf-8-sig", "replace").split(",")]


def is_table(columns: list[str], names: Mapping[str, str]) -> bool:
    """Return whether a table has the required columns among `names`."""
    return all(names[what] in columns for what in _NEEDED)


def read_azure(path: Path, report: Report) -> Iterator[TraceRecord]:
    """Read one of Azure's tables: TIMESTAMP, ContextTokens, GeneratedTokens.

    The workload is `code` or `chat` if the file's name has `_code` or `_conv`.
    """
    workload = next((kind for word, kind in _WORKLOADS.items() if f"_{word}" in path.name.lower()), "")
    for number, (arrived_at, prompt_tokens, output_tokens, *_) in _rows(path, AZURE, report):
        yield TraceRecord(
            id=str(number),
            arrived_at=arrived_at,
            workload=workload,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        )


def read_burstgpt(path: Path, report: Report) -> Iterator[TraceRecord]:
    """Read one of BurstGPT's tables. Requests without response tokens have failed.

    Version 2 also has sessions, and how long each request took. The workload is `chat` for conversations by `Log Type`,
    and unknown for API requests.
    """
    for number, (arrived_at, prompt_tokens, output_tokens, *others) in _rows(path, BURSTGPT, report):
        model, session, log, elapsed = others
        yield TraceRecord(
            id=str(number),
            arrived_at=arrived_at,
            model=model or "",
            session=session or "",
            workload="chat" if (log or "").lower().startswith("conversation") else "",
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            error="" if output_tokens else "failed",
            e2e_s=_seconds(elapsed),
        )


def _seconds(text: str | None) -> float | None:
    """Return a time, 0 or more; None for an empty or another text."""
    try:
        seconds = float(text or "nan")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _rows(path: Path, names: Mapping[str, str], report: Report) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield each line's number and its values in the order of `names`; None for a missing column."""
    import duckdb

    columns = columns_of(next(numbered_lines(path, refuse), (0, b""))[1])
    if not is_table(columns, names):
        raise TraceError(f"{path}: its first line must name the columns {', '.join(names[what] for what in _NEEDED)}")
    expressions = [f"part[{columns.index(name) + 1}]" if name in columns else "null" for name in names.values()]
    time, prompt, output, *others = expressions
    query = f"""
        select coalesce(try_cast({time} as double), epoch_us(try_cast({time} as timestamptz)) / 1e6),
               try_cast({prompt} as bigint), try_cast({output} as bigint), {", ".join(others) or "null"}, part
        from ({_LINES})
    """  # noqa: S608 -- column indices only
    with database() as connection:
        try:
            yield from _checked(path, connection, query, report)
        except duckdb.Error as error:
            raise TraceError(f"{path}: {str(error).splitlines()[0]}") from None


def _checked(
    path: Path, connection: duckdb.DuckDBPyConnection, query: str, report: Report
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for number, (*values, part) in enumerate(rows(connection, query, [str(path), compression_of(path)]), 2):
        if part is None:
            continue  # a blank line
        if None in values[:3] or values[1] < 0 or values[2] < 0:
            report(BrokenLine(path, number, f"expected a time and two whole numbers: {','.join(part)[:80]}"))
            continue
        yield number, tuple(values)
