"""Records in the order of their arrival, however many there are."""

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

HELD = 50_000
"""Records that are sorted in memory; a trace that needs more is sorted by DuckDB, on disk."""

_BATCH = 8192


def lateness(arrivals: Iterable[float]) -> int:
    """Return how many records that arrived later stand before the one that most of them stand before.

    So many records must be held to put a trace in order as it is read: a recorder writes requests as they end, so that
    this is about the number under way at once. Takes 24 bytes a record.
    """
    import numpy as np

    found = np.frombuffer(array("d", arrivals))
    order = np.argsort(found, kind="stable")
    # Of the record that is latest, none that arrived earlier stands after it: so its place less its rank is the answer.
    return int((order - np.arange(len(order))).max(initial=0))


def in_arrival_order(
    records: Iterable[TraceRecord], late: int | None = None, held: int = HELD
) -> Iterator[TraceRecord]:
    """Sort records by `arrived_at`; those that came at the same time, and those without a time, stay as they are.

    Parameters
    ----------
    late
        Their `lateness`, or more than that; None if it is not known.
    held
        Records kept in memory at once.
    """
    if late is not None and late < held:
        return _with_heap(records, late)
    return _with_disk(records, held)


def _with_heap(records: Iterable[TraceRecord], late: int) -> Iterator[TraceRecord]:
    if late == 0:
        yield from records
        return
    heap: list[tuple[float, int, TraceRecord]] = []
    for place, record in enumerate(records):
        entry = (_time(record), place, record)
        if len(heap) < late:
            heappush(heap, entry)
        else:
            yield heappushpop(heap, entry)[2]
    for _, _, record in sorted(heap):
        yield record


def _with_disk(records: Iterable[TraceRecord], held: int) -> Iterator[TraceRecord]:
    coming = iter(records)
    batch = list(islice(coming, held))
    if len(batch) < held:
        yield from sorted(batch, key=_time)
        return
    with database() as connection:
        connection.execute("create table records (arrived_at double, place bigint, line blob)")
        place = 0
        while batch:
            connection.register("batch", _columns(batch, place))
            connection.execute("insert into records select * from batch")
            connection.unregister("batch")
            place += len(batch)
            batch = list(islice(coming, _BATCH))
        for number, (line,) in enumerate(rows(connection, "select line from records order by arrived_at, place"), 1):
            yield decode(orjson.loads(line), number)


def _time(record: TraceRecord) -> float:
    return -math.inf if record.arrived_at is None else record.arrived_at


def _columns(records: list[TraceRecord], place: int) -> dict[str, Any]:
    import numpy as np

    lines = np.empty(len(records), object)
    lines[:] = [encode(record) for record in records]
    return {
        "arrived_at": np.fromiter(map(_time, records), np.float64, len(records)),
        "place": np.arange(place, place + len(records)),
        "line": lines,
    }
