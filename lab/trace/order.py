"""Sorting records by arrival, in memory or on disk."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from heapq import heappush, heappushpop
from itertools import islice
from typing import Any

import orjson

from lab.trace.decode import decode, encode
from lab.trace.duck import database, rows
from lab.trace.record import TraceRecord

MAX_IN_MEMORY = 50_000
"""Number of records from which sorting moves from memory to disk (DuckDB)."""

_BATCH = 8192


def lateness(arrivals: Iterable[float]) -> int:
    """Return the largest number of later arrivals that precede any one record.

    That many records must be held to sort a trace while reading it. A recorder writes requests as they end, so this is
    about the number of concurrent requests. Takes 24 bytes per record.

    Examples
    --------
    >>> lateness([1.0, 4.0, 3.0, 2.0, 5.0])
    2
    """
    import numpy as np

    times = np.frombuffer(array("d", arrivals))
    order = np.argsort(times, kind="stable")
    # No earlier arrival follows the record with most later ones before it, so the result is its index less its rank.
    return int((order - np.arange(len(order))).max(initial=0))


def in_arrival_order(
    records: Iterable[TraceRecord], late: int | None = None, held: int = MAX_IN_MEMORY
) -> Iterator[TraceRecord]:
    """Sort records by `arrived_at`; the sort is stable, and records without a time come first.

    Examples
    --------
    >>> records = [TraceRecord(id="a", arrived_at=2.0), TraceRecord(id="b", arrived_at=1.0)]
    >>> [record.id for record in in_arrival_order(records)]
    ['b', 'a']
    """
    if late is not None and late < held:
        return _with_heap(records, late)
    return _with_disk(records, held)


def _with_heap(records: Iterable[TraceRecord], late: int) -> Iterator[TraceRecord]:
    if late == 0:
        yield from records
        return
    heap: list[tuple[float, int, TraceRecord]] = []
    for index, record in enumerate(records):
        entry = (_time(record), index, record)
        if len(heap) < late:
            heappush(heap, entry)
        else:
            yield heappushpop(heap, entry)[2]
    for _, _, record in sorted(heap):
        yield record


def _with_disk(records: Iterable[TraceRecord], held: int) -> Iterator[TraceRecord]:
    iterator = iter(records)
    batch = list(islice(iterator, held))
    if len(batch) < held:
        yield from sorted(batch, key=_time)
        return
    with database() as connection:
        connection.execute("create table records (arrived_at double, index bigint, line blob)")
        index = 0
        while batch:
            connection.register("batch", _columns(batch, index))
            connection.execute("insert into records select * from batch")
            connection.unregister("batch")
            index += len(batch)
            batch = list(islice(iterator, _BATCH))
        for number, (line,) in enumerate(rows(connection, "select line from records order by arrived_at, index"), 1):
            yield decode(orjson.loads(line), number)


def _time(record: TraceRecord) -> float:
    return -math.inf if record.arrived_at is None else record.arrived_at


def _columns(records: list[TraceRecord], first_index: int) -> dict[str, Any]:
    import numpy as np

    lines = np.empty(len(records), object)
    lines[:] = [encode(record) for record in records]
    return {
        "arrived_at": np.fromiter(map(_time, records), np.float64, len(records)),
        "index": np.arange(first_index, first_index + len(records)),
        "line": lines,
    }
