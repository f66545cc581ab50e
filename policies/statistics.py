"""Observations as sums, which can be added up over requests, gateways and restarts.

All models are fitted to these sums, so two gateways that share theirs learn what one gateway with the traffic of both
would. Sums are kept per bucket (a key of what they depend on) and per epoch of time. With epochs, old observations are
discounted exponentially and dropped without coordination between gateways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

EPOCHS_PER_HALF_LIFE: Final = 4
HALF_LIVES_KEPT: Final = 6
"""Older epochs are dropped: their weight would be below 1/64."""

MAX_KEYS: Final = 4096
"""Most buckets per table and epoch; further keys are merged by `Table.overflow`, and again above twice as many."""

Key = tuple[str, ...]
Sums = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A kind of observations."""

    name: str
    width: int  # number of sums per bucket
    half_life_s: float  # age in seconds at which an observation's weight is one half
    overflow: Callable[[Key], Key]  # maps a key to a more general one, used when the table is full

    @property
    def epoch_s(self) -> float:
        """Length of an epoch in seconds."""
        return self.half_life_s / EPOCHS_PER_HALF_LIFE

    def weight(self, epoch: int, now_s: float) -> float:
        """Return the current weight of observations of an epoch; 1 for the current epoch."""
        age = int(now_s // self.epoch_s) - epoch
        return math.exp2(-max(0, age) / EPOCHS_PER_HALF_LIFE)

    def oldest(self, now_s: float) -> int:
        """Return the oldest epoch that is kept."""
        return int(now_s // self.epoch_s) - EPOCHS_PER_HALF_LIFE * HALF_LIVES_KEPT

    def end_s(self, epoch: int) -> float:
        """Return the time at which an epoch is dropped, in seconds since 1970."""
        return (epoch + EPOCHS_PER_HALF_LIFE * HALF_LIVES_KEPT + 1) * self.epoch_s


class Row(NamedTuple):
    """The sums of one bucket in one epoch."""

    table: str
    epoch: int
    key: Key
    sums: Sums


class _EpochRecord:
    """The gateway's own sums of one table and epoch by key, and whether they changed since the last `take_changed`."""

    __slots__ = ("buckets", "changed", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.buckets: dict[Key, list[float]] = {}
        self.changed = False


class Statistics:
    """The sums of one model: those of this gateway, and those received from others.

    The two are kept apart, so that this gateway's sums can be rewritten to a store that lost them. Only `buckets` and
    `own_of` may be called from another thread.
    """

    def __init__(self, tables: Iterable[Table], clock: Callable[[], float]) -> None:
        self.tables = {table.name: table for table in tables}
        self.clock = clock  # clock in seconds since 1970, so that epochs are the same for all gateways
        self._own: dict[tuple[str, int], _EpochRecord] = {}
        self._last: dict[str, _EpochRecord] = {}  # by table: the record of the last observation
        self._others: dict[tuple[str, int], Mapping[Key, Sums]] = {}
        self._ignored: dict[tuple[str, str], int] = {}  # last epoch of others, by table and first part of keys
        self.observations = 0
        """Number of changes so far; a fit is due when it has grown."""
        self.told = 0
        """Number of changes of others' sums, and of drops."""

    def add(self, table: Table, key: Key, *sums: float) -> None:
        """Add one observation to a bucket at the current time, see `add_at`."""
        self.add_at(self.clock(), table, key, sums)

    def add_at(self, now_s: float, table: Table, key: Key, sums: Sums) -> None:
        """Add one observation to a bucket."""
        total = 0.0
        for number in sums:
            total += number
        is_finite = total - total == 0.0 or all(map(math.isfinite, sums))
        if len(sums) != table.width or not is_finite:
            raise ValueError(f"{table.name} takes {table.width} finite numbers, not {sums}")
        record = self._current(table, now_s)
        buckets = record.buckets
        own = buckets.get(key)
        if own is None:
            for most in (MAX_KEYS, 2 * MAX_KEYS):
                if own is None and len(buckets) >= most:
                    key = table.overflow(key)
                    own = buckets.get(key)
            if own is None:
                own = buckets[key] = [0.0] * table.width
        for index, number in enumerate(sums):
            known: float = own[index]  # when compiled, `+=` on an item adds objects
            own[index] = known + number
        record.changed = True
        self.observations += 1

    def drop(self, table: Table, matches: Callable[[Key], bool]) -> None:
        """Remove this gateway's own sums of matching buckets of a table, in all epochs."""
        for (name, _), record in self._own.items():
            for key in [key for key in record.buckets if matches(key)] if name == table.name else ():
                del record.buckets[key]
                record.changed = True
        self.observations += 1
        self.told += 1

    def forget(self, table: Table, first: str) -> None:
        """Drop own sums, and ignore those of others up to now, in the buckets whose keys begin with `first`.

        Others drop their own, but processes that have ended cannot.
        """
        self.drop(table, lambda key: key[0] == first)
        self._ignored[table.name, first] = int(self.clock() // table.epoch_s)

    def own(self) -> Iterator[Row]:
        """Yield this gateway's own sums of all kept epochs."""
        for (table, epoch), record in self._own.items():
            for key, sums in record.buckets.items():
                yield Row(table, epoch, key, tuple(sums))

    def own_of(self, table: str, epoch: int) -> list[Row]:
        """Return this gateway's own sums of one table and epoch.

        It may be called from another thread; an observation added meanwhile may be included in part, and then counts as
        a change that `take_changed` returns later.
        """
        record = self._own.get((table, epoch))
        buckets = [] if record is None else list(record.buckets.items())  # the copy is atomic under the GIL
        return [Row(table, epoch, key, tuple(sums)) for key, sums in buckets]

    def take_changed(self) -> list[tuple[str, int]]:
        """Return the tables and epochs whose own sums changed since the last call."""
        changed = [page for page, record in self._own.items() if record.changed]
        for page in changed:
            self._own[page].changed = False
        return changed

    def set_others_of(self, table: str, epoch: int, buckets: Mapping[Key, Sums]) -> None:
        """Replace the sums of other gateways in one table and epoch, in a single assignment."""
        if buckets:
            self._others[table, epoch] = buckets
        else:
            self._others.pop((table, epoch), None)
        self.observations += 1
        self.told += 1

    def buckets(self, table: Table) -> dict[Key, Sums]:
        """Return the sums of a table over all epochs and gateways, weighted by age.

        It may be called from another thread; an observation added meanwhile may or may not be included.
        """
        now_s = self.clock()
        total: dict[Key, list[float]] = {}
        for (name, epoch), record in list(self._own.items()):  # the copy is atomic under the GIL
            if name == table.name:
                _add_weighted(total, list(record.buckets.items()), table.weight(epoch, now_s))
        ignored = {first: epoch for (name, first), epoch in list(self._ignored.items()) if name == table.name}
        for (name, epoch), buckets in list(self._others.items()):
            if name == table.name:
                told = list(buckets.items())
                if ignored:
                    told = [(key, sums) for key, sums in told if epoch > ignored.get(key[0], -1)]
                _add_weighted(total, told, table.weight(epoch, now_s))
        return {key: tuple(bucket) for key, bucket in total.items()}

    def _current(self, table: Table, now_s: float) -> _EpochRecord:
        """Return this gateway's own record of the current epoch."""
        epoch = int(now_s // table.epoch_s)
        record = self._last.get(table.name)
        if record is None or record.epoch != epoch:
            record = self._own.get((table.name, epoch))
            if record is None:
                record = self._own[table.name, epoch] = _EpochRecord(epoch)
                self._forget(now_s)
            self._last[table.name] = record
        return record

    def _forget(self, now_s: float) -> None:
        for name, epoch in [*self._own]:
            if epoch < self.tables[name].oldest(now_s):
                del self._own[name, epoch]
        for (name, first), epoch in [*self._ignored.items()]:
            if epoch < self.tables[name].oldest(now_s):
                del self._ignored[name, first]
        self._last.clear()


def _add_weighted(total: dict[Key, list[float]], buckets: Iterable[tuple[Key, Sequence[float]]], weight: float) -> None:
    for key, sums in buckets:
        bucket = total.get(key)
        if bucket is None:
            bucket = total[key] = [0.0] * len(sums)
        for index, number in enumerate(sums):
            bucket[index] += weight * number
