"""What was observed, as sums that add up: over requests, over gateways and over restarts.

Everything that is learned is worked out from these sums, so two gateways that add theirs have learned what one would
have with the traffic of both. Sums stand in cells, by what they depend on, and in epochs of time, so that what is old
can weigh less and be dropped without anybody having to agree on when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

EPOCHS_PER_HALF_LIFE: Final = 4
HALF_LIVES_KEPT: Final = 6
"""Older epochs would weigh less than 1/64, and are dropped."""

MOST_KEYS: Final = 4096
"""Cells of one table and epoch; what would be one more counts under the key that `Table.overflow` makes of it."""

Key = tuple[str, ...]
Sums = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of sums.

    Parameters
    ----------
    width
        Numbers in a cell.
    half_life_s
        Age in seconds at which an observation weighs half.
    overflow
        Makes the key of a cell that is one too many, from its own: the same with what is rarest left out.
    """

    name: str
    width: int
    half_life_s: float
    overflow: Callable[[Key], Key]

    @property
    def epoch_s(self) -> float:
        """Seconds to an epoch."""
        return self.half_life_s / EPOCHS_PER_HALF_LIFE

    def weight(self, epoch: int, now_s: float) -> float:
        """Return what an observation of an epoch weighs now, 1 for the present epoch."""
        age = int(now_s // self.epoch_s) - epoch
        return math.exp2(-max(0, age) / EPOCHS_PER_HALF_LIFE)

    def oldest(self, now_s: float) -> int:
        """Return the oldest epoch that still counts."""
        return int(now_s // self.epoch_s) - EPOCHS_PER_HALF_LIFE * HALF_LIVES_KEPT

    def end_s(self, epoch: int) -> float:
        """Return when an epoch no longer counts, in seconds since 1970."""
        return (epoch + EPOCHS_PER_HALF_LIFE * HALF_LIVES_KEPT + 1) * self.epoch_s


class Row(NamedTuple):
    """Some observations of one cell, to be added to those already there."""

    table: str
    epoch: int
    key: Key
    sums: Sums


class _Cell:
    """Our own sums of one key."""

    __slots__ = ("changed", "key", "sums")

    def __init__(self, key: Key, width: int) -> None:
        self.key = key
        self.sums = [0.0] * width
        self.changed = False


class _Page:
    """Our own cells of one table and epoch, and those of them that were added to since they were last told."""

    __slots__ = ("buckets", "changed", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.buckets: dict[Key, _Cell] = {}
        self.changed: list[_Cell] = []


class Statistics:
    """The sums of one model: our own, and those that others told of.

    Own and others' are kept apart, so that our own can be given again to a store that lost them. Called from one
    thread, but for `buckets`.

    Parameters
    ----------
    clock
        Seconds since 1970: epochs must mean the same to all gateways.
    """

    def __init__(self, tables: Iterable[Table], clock: Callable[[], float]) -> None:
        self.tables = {table.name: table for table in tables}
        self.clock = clock
        self._own: dict[tuple[str, int], _Page] = {}
        self._last: dict[str, _Page] = {}  # of each table, the one that was last added to
        self._others: dict[tuple[str, int], Mapping[Key, Sums]] = {}
        self.observations = 0
        """Cells added to since the beginning; tells whether there is anything new."""

    def add(self, table: Table, key: Key, *sums: float) -> None:
        """Add one observation to a cell, now, see `add_at`."""
        self.add_at(self.clock(), table, key, sums)

    def add_at(self, now_s: float, table: Table, key: Key, sums: Sums) -> None:
        """Add one observation to a cell; numbers that are not finite would spoil it for good, and are refused.

        Raises
        ------
        ValueError
            If there are more or fewer numbers than the table is wide, or one is not finite.
        """
        total = 0.0
        for number in sums:
            total += number
        is_finite = not (math.isinf(total) or math.isnan(total)) or all(map(math.isfinite, sums))
        if len(sums) != table.width or not is_finite:
            raise ValueError(f"{table.name} takes {table.width} finite numbers, not {sums}")
        page = self._page(table, now_s)
        buckets = page.buckets
        bucket = buckets.get(key)
        if bucket is None:
            if len(buckets) >= MOST_KEYS:
                key = table.overflow(key)
                bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = _Cell(key, table.width)
        own = bucket.sums
        for place, number in enumerate(sums):
            own[place] += number
        if not bucket.changed:
            bucket.changed = True
            page.changed.append(bucket)
        self.observations += 1

    def own(self) -> Iterator[Row]:
        """Yield all that this gateway itself has observed and not yet forgotten."""
        for (table, epoch), page in self._own.items():
            for key, bucket in page.buckets.items():
                yield Row(table, epoch, key, tuple(bucket.sums))

    def own_of(self, table: str, epoch: int) -> list[Row]:
        """Return what this gateway itself has observed in one table and epoch."""
        page = self._own.get((table, epoch))
        buckets = {} if page is None else page.buckets
        return [Row(table, epoch, key, tuple(bucket.sums)) for key, bucket in buckets.items()]

    def take_changed(self) -> list[Row]:
        """Return our own sums, whole, of the cells that were added to since the last call."""
        rows = []
        for (table, epoch), page in self._own.items():
            for bucket in page.changed:
                rows.append(Row(table, epoch, bucket.key, tuple(bucket.sums)))
                bucket.changed = False
            page.changed.clear()
        return rows

    def set_others(self, rows: Iterable[Row]) -> None:
        """Replace what others are known to have observed; rows of unknown tables or of another width are left out."""
        others: dict[tuple[str, int], dict[Key, Sums]] = {}
        for row in rows:
            table = self.tables.get(row.table)
            if table is not None and len(row.sums) == table.width:
                others.setdefault((row.table, row.epoch), {})[row.key] = row.sums
        self._others = dict(others)
        self.observations += 1

    def set_others_of(self, table: str, epoch: int, buckets: Mapping[Key, Sums]) -> None:
        """Replace what others are known to have observed in one table and epoch, in one assignment.

        Parameters
        ----------
        cells
            Each as wide as the table; kept as it is, so it must not be changed any more.
        """
        if buckets:
            self._others[table, epoch] = buckets
        else:
            self._others.pop((table, epoch), None)
        self.observations += 1

    def buckets(self, table: Table) -> dict[Key, Sums]:
        """Return the sums of a table over all epochs, weighed by age: own and others' together.

        May be called from another thread than the rest: what is added meanwhile may be in it or not.
        """
        now_s = self.clock()
        total: dict[Key, list[float]] = {}
        for (name, epoch), page in list(self._own.items()):  # a list is made in one go, whoever adds meanwhile
            if name == table.name:
                own = [(key, bucket.sums) for key, bucket in list(page.buckets.items())]
                _add_weighed(total, own, table.weight(epoch, now_s))
        for (name, epoch), buckets in list(self._others.items()):
            if name == table.name:
                _add_weighed(total, list(buckets.items()), table.weight(epoch, now_s))
        return {key: tuple(bucket) for key, bucket in total.items()}

    def _page(self, table: Table, now_s: float) -> _Page:
        """Return the page of now, a new one if there is none."""
        epoch = int(now_s // table.epoch_s)
        page = self._last.get(table.name)
        if page is None or page.epoch != epoch:
            page = self._own.get((table.name, epoch))
            if page is None:
                page = self._own[table.name, epoch] = _Page(epoch)
                self._forget(now_s)
            self._last[table.name] = page
        return page

    def _forget(self, now_s: float) -> None:
        for name, epoch in [*self._own]:
            if epoch < self.tables[name].oldest(now_s):
                del self._own[name, epoch]
        self._last.clear()


def _add_weighed(total: dict[Key, list[float]], buckets: Iterable[tuple[Key, Sequence[float]]], weight: float) -> None:
    for key, sums in buckets:
        bucket = total.get(key)
        if bucket is None:
            bucket = total[key] = [0.0] * len(sums)
        for place, number in enumerate(sums):
            bucket[place] += weight * number
