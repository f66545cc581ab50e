"""What a trace comes to: figures worked out by DuckDB, however many requests there are."""

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
MOST_EXACT = 5_000_000
"""Requests up to which quantiles are exact; beyond, they are estimated by t-digest."""

_MOST_LISTED = 10
_BATCH = 8192


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure is spread over the requests that have it."""

    requests: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Share:
    """Requests that have something in common.

    Parameters
    ----------
    value
        What they have in common; empty for those that have nothing.
    """

    value: str
    requests: int
    prompt_tokens_mean: float
    output_tokens_mean: float | None


@dataclass(frozen=True, slots=True)
class Steps:
    """Output tokens per step by one method, over the requests whose record tells."""

    method: str
    requests: int
    mean: float
    p50: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a trace.

    Parameters
    ----------
    files
        With the format of each.
    first_at
        Seconds since 1970, or since another beginning; None in a trace without times.
    rate_per_s
        Requests per second from the first arrival to the last.
    texts
        Requests with their text, token ids or hashes.
    prefix_blocks, prefix_reuse
        Blocks at the heads of prompts, and about which share of them an earlier request had too.
    groups
        By what they are grouped by, the largest first; what comes after the tenth is not listed.
    distinct
        How many groups there are, and how many sessions.
    acceptance
        What the records tell of each method.
    """

    files: dict[str, str]
    requests: int
    broken_lines: int
    first_at: float | None
    duration_s: float | None
    rate_per_s: float | None
    texts: int
    prefix_blocks: int
    prefix_reuse: float | None
    exact: bool
    measures: dict[str, Spread]
    groups: dict[str, list[Share]]
    distinct: dict[str, int]
    acceptance: list[Steps]


def summarize(records: Iterable[TraceRecord], files: Sequence[Path], broken: BrokenLines) -> Summary:
    """Read a trace to its end and work out what it comes to."""
    with database() as connection:
        _create(connection)
        coming = iter(records)
        while some := list(islice(coming, _BATCH)):
            for table, columns in (("requests", _columns(some)), ("steps", _steps(some)), ("blocks", _blocks(some))):
                connection.register("batch", columns)
                connection.execute(f"insert into {table} select * from batch")  # noqa: S608 -- one of the three
                connection.unregister("batch")
        return _summary(connection, files, broken.count)


def mean_acceptance_length(steps: Sequence[int] | float) -> float | None:
    """Return output tokens per step: of a list, on the way from position 0 to its end; None of an empty one."""
    if isinstance(steps, int | float):
        return float(steps)
    position = taken = 0
    while position < len(steps):
        position += steps[position]
        taken += 1
    return len(steps) / taken if taken else None


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
    told = (bool(one.prompt or one.messages or one.output or one.text) for one in records)
    columns["has_text"] = np.fromiter(told, np.bool_, len(records))
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
    told: list[tuple[str, float]] = []
    for record in records:
        for method, steps in record.acceptance.items():
            if (length := mean_acceptance_length(steps)) is not None:
                told.append((method, length))
        own = None if record.spec is None else record.spec.tokens_per_step
        if own is not None and record.method not in record.acceptance:
            told.append((record.method, own))
    methods = np.empty(len(told), object)
    methods[:] = [method for method, _ in told]
    return {"method": methods, "length": np.array([length for _, length in told], np.float64)}


def _blocks(records: list[TraceRecord]) -> dict[str, Any]:
    return {"number": np.fromiter((block for record in records for block in record.prefix_blocks), np.int64)}


def _summary(connection: duckdb.DuckDBPyConnection, files: Sequence[Path], broken_lines: int) -> Summary:
    requests, first_at, last_at, texts = _row(
        connection,
        "select count(*), min(seen), max(seen), count(*) filter (has_text) "
        "from (select if(isnan(arrived_at), null, arrived_at) as seen, has_text from requests)",
    )
    blocks, distinct_blocks = _row(connection, "select count(*), approx_count_distinct(number) from blocks")
    duration_s = None if first_at is None else last_at - first_at
    exact = requests <= MOST_EXACT
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
        from requests group by {name} order by requests desc, {name} limit {_MOST_LISTED}
    """  # noqa: S608 -- names of columns
    return [Share(*row) for row in connection.execute(query).fetchall()]


def _row(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[Any, ...]:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row
