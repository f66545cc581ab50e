"""Summary figures of a trace of any size, computed by DuckDB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.trace.duck import database, insert
from lab.trace.lines import BrokenLines
from lab.trace.read import detect_format
from lab.trace.record import LARGEST_BLOCK, TraceRecord

if TYPE_CHECKING:
    import duckdb

GROUPS = ("model", "workload", "template", "key", "policy", "arm", "backend", "method", "error")
MAX_EXACT_REQUESTS = 5_000_000
"""Requests up to which quantiles are exact; beyond, they are t-digest estimates."""

_QUANTILES = (0.5, 0.9, 0.99)
_MAX_LISTED = 10
_BATCH = 8192
_ERRORS = 400  # lowest HTTP status of an error

_MEASURES = (
    "prompt_tokens", "output_tokens", "temperature", "tokens_per_step", "share_cached", "ttft_s", "tpot_s", "e2e_s",
    "queue_s",
)  # fmt: skip
_NUMBERS = ("arrived_at", *_MEASURES)
_TEXTS = (*GROUPS, "session")


def summarize(records: Iterable[TraceRecord], files: Sequence[Path], broken: BrokenLines) -> dict[str, Any]:
    """Return the figures of a trace, as `gateway trace show --json` writes them.

    `measures` and `groups` hold the figures of each field, and of each value of a field, most frequent first.
    `prefix_reuse` is the approximate share of prefix blocks that an earlier request also had.
    """
    with database() as connection:
        numbers = ", ".join(f"{name} double" for name in _NUMBERS)
        texts = ", ".join(f"{name} varchar" for name in _TEXTS)
        connection.execute(f"create table requests ({numbers}, {texts}, has_text boolean)")
        connection.execute("create table steps (method varchar, length double)")
        connection.execute("create table blocks (number bigint)")
        iterator = iter(records)
        while batch := list(islice(iterator, _BATCH)):
            insert(connection, "requests", _columns(batch))
            insert(connection, "steps", _steps(batch))
            blocks = (block & LARGEST_BLOCK for record in batch for block in record.prefix_blocks)
            insert(connection, "blocks", {"number": np.fromiter(blocks, np.int64)})
        return {"files": {str(file): detect_format(file) for file in files}} | _summary(connection, broken.count)


def mean_acceptance_length(steps: Sequence[int] | float) -> float | None:
    """Return output tokens per step for an entry of `TraceRecord.acceptance`; None for an empty list.

    Examples
    --------
    >>> mean_acceptance_length([1, 3, 9, 9, 2, 1])  # steps start at positions 0, 1 and 4
    2.0
    """
    if isinstance(steps, int | float):
        return float(steps)
    position = count = 0
    while position < len(steps):
        position += steps[position]
        count += 1
    return len(steps) / count if count else None


def _columns(records: list[TraceRecord]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in _NUMBERS:
        columns[name] = np.array([getattr(record, name) for record in records], np.float64)  # None becomes NaN
    # What was refused or failed has no time to finish: a refusal within a millisecond is no fast answer.
    columns["e2e_s"][[(record.status or 0) >= _ERRORS for record in records]] = np.nan
    for name in _TEXTS:
        columns[name] = _objects([getattr(record, name) for record in records])
    columns["has_text"] = np.array([bool(one.prompt or one.messages or one.output or one.text) for one in records])
    return columns


def _steps(records: list[TraceRecord]) -> dict[str, Any]:
    lengths: list[tuple[str, float]] = []
    for record in records:
        for method, steps in record.acceptance.items():
            if (length := mean_acceptance_length(steps)) is not None:
                lengths.append((method, length))
        if record.tokens_per_step is not None and record.method not in record.acceptance:
            lengths.append((record.method, record.tokens_per_step))
    return {
        "method": _objects([method for method, _ in lengths]),
        "length": np.array([length for _, length in lengths], np.float64),
    }


def _objects(values: list[str]) -> Any:
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _summary(connection: duckdb.DuckDBPyConnection, broken_lines: int) -> dict[str, Any]:
    def select(what: str) -> list[dict[str, Any]]:
        """Return the rows of a query as objects."""
        found = connection.execute(f"select {what}")
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    (times,) = select(
        "count(*) as requests, count(time) as timed, min(time) as first_at, max(time) - min(time) as duration_s, "
        "count(*) filter (has_text) as texts "
        "from (select if(isnan(arrived_at), null, arrived_at) as time, has_text from requests)"
    )
    (blocks,) = select("count(*) as total, approx_count_distinct(number) as different from blocks")
    distinct = {
        name: select(f"count(distinct {name}) filter ({name} <> '') as count from requests")[0]["count"]
        for name in _TEXTS
    }
    exact = times["requests"] <= MAX_EXACT_REQUESTS
    quantile = "quantile_cont" if exact else "approx_quantile"
    measures = {}
    for name in _MEASURES:
        at = ", ".join(f"{quantile}({name}, {q}) as p{100 * q:.0f}" for q in _QUANTILES)
        (row,) = select(
            f"count(*) as requests, avg({name}) as mean, {at}, max({name}) as max from requests where not isnan({name})"
        )
        if row["requests"]:
            measures[name] = row
    groups = {
        name: select(
            f"{name} as value, count(*) as requests, avg(prompt_tokens) as prompt_tokens_mean, "
            "avg(output_tokens) filter (not isnan(output_tokens)) as output_tokens_mean "
            f"from requests group by {name} order by requests desc, {name} limit {_MAX_LISTED}"
        )
        for name in GROUPS
        if distinct[name]
    }
    return times | {
        "broken_lines": broken_lines,
        "rate_per_s": (times["timed"] - 1) / times["duration_s"] if times["duration_s"] else None,
        "prefix_blocks": blocks["total"],
        "prefix_reuse": max(0.0, 1.0 - blocks["different"] / blocks["total"]) if blocks["total"] else None,
        "exact": exact,
        "measures": measures,
        "groups": groups,
        "distinct": distinct,
        "acceptance": select(
            "method, count(*) as requests, avg(length) as mean, median(length) as p50 "
            "from steps group by method order by method"
        ),
    }
