"""Summary figures of a trace of any size, computed by DuckDB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.trace import BrokenLines, TraceRecord, detect_format
from lab.trace.duck import database

if TYPE_CHECKING:
    import duckdb

QUANTILES = (0.5, 0.9, 0.99)
LENGTHS = ("prompt_tokens", "output_tokens", "temperature", "tokens_per_step", "share_cached")
TIMES = ("ttft_s", "tpot_s", "e2e_s", "queue_s")
MEASURES = (*LENGTHS, *TIMES)
GROUPS = ("model", "workload", "template", "key", "policy", "backend", "method", "error")
MAX_EXACT_REQUESTS = 5_000_000
"""Number of requests up to which quantiles are exact; beyond, they are t-digest estimates."""

_MAX_LISTED = 10
_BATCH = 8192


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a figure over the requests that have it."""

    requests: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Share:
    """A group of requests with the same value in some field."""

    value: str  # the common value; empty for requests without one
    requests: int
    prompt_tokens_mean: float
    output_tokens_mean: float | None


@dataclass(frozen=True, slots=True)
class Steps:
    """Output tokens per step of one method, over the requests for which they are known."""

    method: str
    requests: int
    mean: float
    p50: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a trace."""

    files: dict[str, str]  # format by file
    requests: int
    broken_lines: int
    first_at: float | None  # first arrival in seconds since 1970 or another origin; None in a trace without times
    duration_s: float | None
    rate_per_s: float | None  # requests per second from the first arrival to the last
    texts: int  # number of requests with text, token ids or hashes
    # prefix_blocks, prefix_reuse: number of prefix blocks, and the approximate share of them that an earlier request
    # had too.
    prefix_blocks: int
    prefix_reuse: float | None
    exact: bool  # whether quantiles are exact
    measures: dict[str, Spread]
    groups: dict[str, list[Share]]  # the ten largest groups by field, largest first
    distinct: dict[str, int]  # number of groups by field, and number of sessions
    acceptance: list[Steps]  # output tokens per step by method


def summarize(records: Iterable[TraceRecord], files: Sequence[Path], broken: BrokenLines) -> Summary:
    """Read a trace to its end and summarize it."""
    with database() as connection:
        _create(connection)
        iterator = iter(records)
        while batch := list(islice(iterator, _BATCH)):
            for table, columns in (("requests", _columns(batch)), ("steps", _steps(batch)), ("blocks", _blocks(batch))):
                connection.register("batch", columns)
                connection.execute(f"insert into {table} select * from batch")  # noqa: S608 -- a constant
                connection.unregister("batch")
        return _summary(connection, files, broken.count)


def mean_acceptance_length(steps: Sequence[int] | float) -> float | None:
    """Return output tokens per step, for an entry of `TraceRecord.acceptance`; None for an empty list.

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


def _create(connection: duckdb.DuckDBPyConnection) -> None:
    numbers = ", ".join(f"{name} double" for name in ("arrived_at", *MEASURES))
    texts = ", ".join(f"{name} varchar" for name in (*GROUPS, "session"))
    connection.execute(f"create table requests ({numbers}, {texts}, has_text boolean)")
    connection.execute("create table steps (method varchar, length double)")
    connection.execute("create table blocks (number bigint)")


def _columns(records: list[TraceRecord]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in ("arrived_at", *MEASURES):
        columns[name] = np.fromiter((_number(name, record) for record in records), np.float64, len(records))
    for name in (*GROUPS, "session"):
        values = np.empty(len(records), object)
        values[:] = [getattr(record, name) for record in records]
        columns[name] = values
    has_text = (bool(record.prompt or record.messages or record.output or record.text) for record in records)
    columns["has_text"] = np.fromiter(has_text, np.bool_, len(records))
    return columns


def _number(name: str, record: TraceRecord) -> float:
    value: float | None
    if name == "tokens_per_step":
        value = None if record.spec is None else record.spec.tokens_per_step
    elif name == "share_cached":
        cached = record.cached_tokens
        value = None if cached is None or not record.prompt_tokens else cached / record.prompt_tokens
    else:
        value = getattr(record, name)
    return np.nan if value is None else value


def _steps(records: list[TraceRecord]) -> dict[str, Any]:
    lengths: list[tuple[str, float]] = []
    for record in records:
        for method, steps in record.acceptance.items():
            if (length := mean_acceptance_length(steps)) is not None:
                lengths.append((method, length))
        reported = None if record.spec is None else record.spec.tokens_per_step
        if reported is not None and record.method not in record.acceptance:
            lengths.append((record.method, reported))
    methods = np.empty(len(lengths), object)
    methods[:] = [method for method, _ in lengths]
    return {"method": methods, "length": np.array([length for _, length in lengths], np.float64)}


def _blocks(records: list[TraceRecord]) -> dict[str, Any]:
    return {"number": np.fromiter((block for record in records for block in record.prefix_blocks), np.int64)}


def _summary(connection: duckdb.DuckDBPyConnection, files: Sequence[Path], broken_lines: int) -> Summary:
    requests, first_at, last_at, texts = _row(
        connection,
        "select count(*), min(time), max(time), count(*) filter (has_text) "
        "from (select if(isnan(arrived_at), null, arrived_at) as time, has_text from requests)",
    )
    blocks, distinct_blocks = _row(connection, "select count(*), approx_count_distinct(number) from blocks")
    duration_s = None if first_at is None else last_at - first_at
    exact = requests <= MAX_EXACT_REQUESTS
    distinct = {
        name: _row(connection, f"select count(distinct {name}) filter ({name} <> '') from requests")[0]  # noqa: S608
        for name in (*GROUPS, "session")
    }
    return Summary(
        files={str(file): detect_format(file) for file in files},
        requests=requests,
        broken_lines=broken_lines,
        first_at=first_at,
        duration_s=duration_s,
        rate_per_s=(requests - 1) / duration_s if duration_s else None,
        texts=texts,
        prefix_blocks=blocks,
        prefix_reuse=max(0.0, 1.0 - distinct_blocks / blocks) if blocks else None,
        exact=exact,
        measures=dict(_measures(connection, exact=exact)),
        groups={name: _shares(connection, name) for name in GROUPS if distinct[name]},
        distinct=distinct,
        acceptance=[
            Steps(*row)
            for row in connection.execute(
                "select method, count(*), avg(length), median(length) from steps group by method order by method"
            ).fetchall()
        ],
    )


def _measures(connection: duckdb.DuckDBPyConnection, *, exact: bool) -> Iterator[tuple[str, Spread]]:
    quantile = "quantile_cont" if exact else "approx_quantile"
    for name in MEASURES:
        at = ", ".join(f"{quantile}({name}, {q})" for q in QUANTILES)
        query = f"select count(*), avg({name}), {at}, max({name}) from requests where not isnan({name})"  # noqa: S608
        row = _row(connection, query)
        if row[0]:
            yield name, Spread(*row)


def _shares(connection: duckdb.DuckDBPyConnection, name: str) -> list[Share]:
    query = f"""
        select {name}, count(*) as requests, avg(prompt_tokens), avg(output_tokens) filter (not isnan(output_tokens))
        from requests group by {name} order by requests desc, {name} limit {_MAX_LISTED}
    """  # noqa: S608 -- column names
    return [Share(*row) for row in connection.execute(query).fetchall()]


def _row(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[Any, ...]:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row
