"""Records in the order of their arrival, however many there are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import orjson

from policies.trace.decode import decode, encode
from policies.trace.duck import database, rows
from policies.trace.record import TraceRecord

HELD = 20_000
"""Records that are sorted in memory; longer traces are sorted by DuckDB, on disk."""

_BATCH = 8192


def in_arrival_order(records: Iterable[TraceRecord], held: int = HELD) -> Iterator[TraceRecord]:
    """Sort records by `arrived_at`; those that came at the same time, and those without a time, stay as they are.

    Parameters
    ----------
    held
        Records kept in memory at once.
    """
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
