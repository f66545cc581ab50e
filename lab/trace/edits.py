"""Parts of a trace: windows and random shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

from lab.trace.record import TraceRecord

_SCALE = float(1 << 64)

Read = Callable[[], Iterator[TraceRecord]]


def first_arrival(records: Iterable[TraceRecord]) -> float | None:
    """Return the earliest arrival time; None in a trace without times."""
    return min((record.arrived_at for record in records if record.arrived_at is not None), default=None)


def window(records: Iterable[TraceRecord], again: Read, start_s: float, end_s: float | None) -> Iterator[TraceRecord]:
    """Yield the records that arrived between two times after the first arrival, the end excluded.

    `again` reads the trace a second time, to find its first arrival. Only the whole trace includes records without a
    time.

    Examples
    --------
    >>> trace = [TraceRecord(id=str(number), arrived_at=float(number)) for number in range(5)]
    >>> [record.id for record in window(trace, lambda: iter(trace), 1.0, 3.0)]
    ['1', '2']
    """
    if start_s <= 0 and end_s is None:
        yield from records
        return
    begun_at = first_arrival(again())
    if begun_at is None:
        return
    start, end = begun_at + start_s, begun_at + (math.inf if end_s is None else end_s)
    for record in records:
        if record.arrived_at is not None and start <= record.arrived_at < end:
            yield record


def draw(key: str, salt: str | int = "") -> int:
    """Return a uniformly distributed number below 2**64 that depends only on the salt and the key.

    Examples
    --------
    >>> [draw("a-request", salt) % 7 for salt in ("", 1, "1")]  # what was split once stays split
    [4, 5, 5]
    """
    return int.from_bytes(blake2b(f"{salt}:{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def share_of(records: Iterable[TraceRecord], share: float, seed: int, *, sessions: bool) -> Iterator[TraceRecord]:
    """Yield a share of the records, or of the sessions; a larger share includes a smaller one.

    A record without a session is a session of its own.
    """
    for index, record in enumerate(records):
        key = f"={record.session}" if sessions and record.session else str(index)
        if draw(key, seed) < share * _SCALE:
            yield record
