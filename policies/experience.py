"""What was observed, as sums that add up: over requests, over gateways and over restarts.

Everything that is learned is worked out from these sums, so two gateways that add theirs have learned what one would
have with the traffic of both. Sums stand in cells, by what they depend on, and in epochs of time, so that what is old
can weigh less and be dropped without anybody having to agree on when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

EPOCHS_PER_HALF_LIFE = 4
HALF_LIVES_KEPT = 6
"""Older epochs would weigh less than 1/64, and are dropped."""

MOST_KEYS = 4096
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


class Experience:
    """The sums of one model: our own, and those that others told of.

    Own and others' are kept apart, so that our own can be given again to a store that lost them. Called from one
    thread, but for `cells`.

    Parameters
    ----------
    clock
        Seconds since 1970: epochs must mean the same to all gateways.
    """

    def __init__(self, tables: Iterable[Table], clock: Callable[[], float]) -> None:
        self.tables = {table.name: table for table in tables}
        self.clock = clock
        self._own: dict[tuple[str, int], dict[Key, list[float]]] = {}
        self._others: dict[tuple[str, int], Mapping[Key, Sums]] = {}
        self._changed: dict[tuple[str, int], set[Key]] = {}
        self.observations = 0
        """Cells added to since the beginning; tells whether there is anything new."""

    def add(self, table: Table, key: Key, *sums: float) -> None:
        """Add one observation to a cell; numbers that are not finite would spoil it for good, and are refused.

        Raises
        ------
        ValueError
            If there are more or fewer numbers than the table is wide, or one is not finite.
        """
        if len(sums) != table.width or not (math.isfinite(sum(sums)) or all(map(math.isfinite, sums))):
            raise ValueError(f"{table.name} takes {table.width} finite numbers, not {sums}")
        page = table.name, int(self.clock() // table.epoch_s)
        cells = self._own.get(page)
        if cells is None:
            cells = self._own[page] = {}
            self._changed[page] = set()
            self._forget()
        cell = cells.get(key)
        if cell is None:
            if len(cells) >= MOST_KEYS:
                key = table.overflow(key)
                cell = cells.get(key)
            if cell is None:
                cell = cells[key] = [0.0] * table.width
        for place, number in enumerate(sums):
            cell[place] += number
        self._changed[page].add(key)
        self.observations += 1

    def own(self) -> Iterator[Row]:
        """Yield all that this gateway itself has observed and not yet forgotten."""
        for (table, epoch), cells in self._own.items():
            for key, cell in cells.items():
                yield Row(table, epoch, key, tuple(cell))

    def own_of(self, table: str, epoch: int) -> list[Row]:
        """Return what this gateway itself has observed in one table and epoch."""
        return [Row(table, epoch, key, tuple(cell)) for key, cell in self._own.get((table, epoch), {}).items()]

    def take_changed(self) -> list[Row]:
        """Return our own sums, whole, of the cells that were added to since the last call."""
        rows = []
        for (table, epoch), keys in self._changed.items():
            cells = self._own[table, epoch]
            rows += [Row(table, epoch, key, tuple(cells[key])) for key in keys]
            keys.clear()
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

    def set_others_of(self, table: str, epoch: int, cells: Mapping[Key, Sums]) -> None:
        """Replace what others are known to have observed in one table and epoch, in one assignment.

        Parameters
        ----------
        cells
            Each as wide as the table; kept as it is, so it must not be changed any more.
        """
        if cells:
            self._others[table, epoch] = cells
        else:
            self._others.pop((table, epoch), None)
        self.observations += 1

    def cells(self, table: Table) -> dict[Key, Sums]:
        """Return the sums of a table over all epochs, weighed by age: own and others' together.

        May be called from another thread than the rest: what is added meanwhile may be in it or not.
        """
        now_s = self.clock()
        total: dict[Key, list[float]] = {}
        sources: tuple[Mapping[tuple[str, int], Mapping[Key, Sequence[float]]], ...] = (self._own, self._others)
        for source in sources:
            for (name, epoch), cells in list(source.items()):  # a list is made in one go, whoever adds meanwhile
                if name != table.name:
                    continue
                weight = table.weight(epoch, now_s)
                for key, sums in list(cells.items()):
                    cell = total.setdefault(key, [0.0] * table.width)
                    for place, number in enumerate(sums):
                        cell[place] += weight * number
        return {key: tuple(cell) for key, cell in total.items()}

    def _forget(self) -> None:
        now_s = self.clock()
        for name, epoch in [*self._own]:
            if epoch < self.tables[name].oldest(now_s):
                del self._own[name, epoch]
                del self._changed[name, epoch]
