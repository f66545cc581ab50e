"""Sampling a trace: a window of time, and a share or number of its requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from lab.trace import TraceRecord
from lab.trace.duck import database
from lab.trace.edits import first_arrival
from policies.split import draw

_BATCH = 8192
_SCALE = float(1 << 64)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a trace to take."""

    # share, limit, first: share of requests, 0 to 1; number of random requests; number of requests from the beginning.
    # At most one is given.
    share: float | None = None
    limit: int | None = None
    first: int | None = None
    # `request`, `session` or `template`: the unit that is taken as a whole or not at all. A request without a session
    # or template is a unit of its own.
    whole: str = "request"
    # start_s, end_s: window in seconds after the first arrival. Requests without a time are taken only without a
    # window.
    start_s: float = 0.0
    end_s: float | None = None
    seed: int = 0  # random seed


def sample_records(
    part: Part, again: Callable[[], Iterator[TraceRecord]], records: Iterator[TraceRecord]
) -> Iterator[TraceRecord]:
    """Yield the requests of a part, in their order in the trace.

    Examples
    --------
    >>> trace = [TraceRecord(id=str(number), arrived_at=float(number)) for number in range(5)]
    >>> [record.id for record in sample_records(Part(start_s=1.0, end_s=3.0), lambda: iter(trace), iter(trace))]
    ['1', '2']
    """
    begun_at = first_arrival(again()) if part.start_s > 0 or part.end_s is not None else None
    windowed = _in_window(part, begun_at, records)
    if part.share is not None:
        below = part.share * _SCALE  # so that a larger share includes a smaller one
        return (record for key, record in _keyed(part, windowed) if draw(key, part.seed) < below)
    if part.limit is not None:
        taken = _taken(part, _in_window(part, begun_at, again()))
        return (record for key, record in _keyed(part, windowed) if key in taken)
    return islice(windowed, part.first)


def _in_window(part: Part, begun_at: float | None, records: Iterator[TraceRecord]) -> Iterator[TraceRecord]:
    if begun_at is None:
        return records
    start, end = begun_at + part.start_s, begun_at + (math.inf if part.end_s is None else part.end_s)
    return (record for record in records if record.arrived_at is not None and start <= record.arrived_at < end)


def _keyed(part: Part, records: Iterable[TraceRecord]) -> Iterator[tuple[str, TraceRecord]]:
    for index, record in enumerate(records):
        key = record.session if part.whole == "session" else record.template if part.whole == "template" else ""
        yield (f"={key}" if key else str(index)), record


def _taken(part: Part, records: Iterator[TraceRecord]) -> Container[str]:
    """Return the keys taken for a limit: groups in the order of their draws, as long as they fit."""
    keys = (key for key, _ in _keyed(part, records))
    with database() as connection:
        connection.execute("create table requests (key varchar, draw ubigint)")
        while batch := list(islice(keys, _BATCH)):
            connection.register("batch", _columns(part.seed, batch))
            connection.execute("insert into requests select * from batch")
            connection.unregister("batch")
        groups = connection.execute(
            """
            select key from (
              select key, sum(size) over (order by draw, key rows unbounded preceding) as so_far
              from (select key, any_value(draw) as draw, count(*) as size from requests group by key)
            ) where so_far <= ?
            """,
            [part.limit],
        )
        return {key for (key,) in groups.fetchall()}


def _columns(seed: int, keys: list[str]) -> dict[str, Any]:
    names = np.empty(len(keys), object)
    names[:] = keys
    return {"key": names, "draw": np.fromiter((draw(key, seed) for key in keys), np.uint64, len(keys))}
