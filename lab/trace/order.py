"""Sorting records by arrival, in memory or on disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import orjson

from lab.trace.decode import decode, encode
from lab.trace.duck import database, insert, rows
from lab.trace.record import TraceRecord

MAX_IN_MEMORY = 50_000
"""Number of records from which sorting moves from memory to disk (DuckDB)."""

_BATCH = 8192


def in_arrival_order(records: Iterable[TraceRecord], held: int = MAX_IN_MEMORY) -> Iterator[TraceRecord]:
    """Sort records by `arrived_at`; the sort is stable, and records without a time come first.

    Examples
    --------
    >>> records = [TraceRecord(id="a", arrived_at=2.0), TraceRecord(id="b", arrived_at=1.0)]
    >>> [record.id for record in in_arrival_order(records)]
    ['b', 'a']
    """
    iterator = iter(records)
    batch = list(islice(iterator, held))
    if len(batch) < held:
        yield from sorted(batch, key=_time)
        return
    with database() as connection:
        connection.execute("create table records (arrived_at double, index bigint, line blob)")
        index = 0
        while batch:
            lines = np.empty(len(batch), object)
            lines[:] = [encode(record) for record in batch]
            times = np.fromiter(map(_time, batch), np.float64, len(batch))
            insert(connection, "records", {"at": times, "index": np.arange(index, index + len(batch)), "line": lines})
            index += len(batch)
            batch = list(islice(iterator, _BATCH))
        for number, (line,) in enumerate(rows(connection, "select line from records order by arrived_at, index"), 1):
            yield decode(orjson.loads(line), number)


def _time(record: TraceRecord) -> float:
    return -math.inf if record.arrived_at is None else record.arrived_at
