"""Synchronisation of a model's statistics with a store: what has been pushed, and what is still to be pushed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.state.store import Content, Push, Receipt, Store
from policies.statistics import Key, Row, Statistics, Sums, Table

_ROUNDING = 1e-9
"""Relative tolerance below which (total - own) counts as zero."""


@dataclass(slots=True)
class _Page:
    """A writer's view of a page: one table over one epoch.

    Parameters
    ----------
    generation
        Generation of the page in the store that `batch` and `pushed` refer to; empty before it was seen.
    batch
        Number of our last acknowledged push.
    pushed
        Our sums in the store.
    changed
        Our sums to push next.
    sent
        A push that has not been acknowledged; it may or may not have arrived.
    sent_sums
        What `pushed` becomes for its keys once `sent` is acknowledged.
    stamp
        Stamp of the content read last.
    lost
        Whether all our sums must be pushed again.
    """

    table: Table
    epoch: int
    generation: str = ""
    batch: int = 0
    pushed: dict[Key, Sums] = field(default_factory=dict)
    changed: dict[Key, Sums] = field(default_factory=dict)
    sent: Push | None = None
    sent_sums: dict[Key, Sums] = field(default_factory=dict)
    stamp: str = ""
    lost: bool = False

    def forget(self, generation: str) -> None:
        """Reset the page: the store holds none of our sums."""
        self.generation = generation
        self.batch = 0
        self.pushed, self.changed, self.sent_sums = {}, {}, {}
        self.sent = None
        self.stamp = ""
        self.lost = True


class Ledger:
    """Exchanges one model's statistics with a store, counting nothing twice.

    Called in three steps: `stage` and `settle` in the thread that owns the statistics, `exchange` in any thread. A step
    that fails, or whose outcome is unknown, is repeated.

    Parameters
    ----------
    writer
        Unique name of this process, never reused.
    """

    def __init__(self, model: str, statistics: Statistics, writer: str) -> None:
        self.model = model
        self._statistics = statistics
        self._writer = writer
        self._tables = {f"{table.name}.{table.width}.{table.epoch_s:g}": table for table in statistics.tables.values()}
        self._names = {table.name: name for name, table in self._tables.items()}
        self._pages: dict[str, _Page] = {}
        self._fetched: dict[str, dict[Key, Sums]] = {}
        self.rows_pushed = 0
        self.rows_read = 0
        self.pages_lost = 0

    def stage(self) -> None:
        """Collect the sums that changed since the last call, and prepare the pushes."""
        now_s = self._statistics.clock()
        for name, page in [*self._pages.items()]:
            if page.table.end_s(page.epoch) <= now_s:
                self._statistics.set_others_of(page.table.name, page.epoch, {})
                del self._pages[name]
        for row in self._statistics.take_changed():
            self._page_of(row).changed[row.key] = row.sums
        for name, page in self._pages.items():
            if page.lost:
                page.changed = {row.key: row.sums for row in self._statistics.own_of(page.table.name, page.epoch)}
                page.lost = False
            if page.changed and page.sent is None:
                page.sent_sums, page.changed = page.changed, {}
                page.sent = self._push(name, page, _difference(page.sent_sums, page.pushed))

    def exchange(self, store: Store) -> None:
        """Send the prepared pushes, and read what other writers have pushed.

        Raises
        ------
        StateError
            If the store fails.
        """
        staged = [(page, page.sent) for page in self._pages.values() if page.sent is not None]
        receipts = store.push(self.model, self._writer, [push for _, push in staged]) if staged else []
        for (page, push), receipt in zip(staged, receipts, strict=True):
            self._acknowledge(page, push, receipt)
        stamps = store.stamps(self.model)
        for name, page in self._pages.items():
            if page.batch and name not in stamps:
                self._lose(page, "")
        updated = [name for name, stamp in stamps.items() if self._is_current(name) and self._find(name).stamp != stamp]
        for name, content in store.read(self.model, self._writer, updated).items() if updated else ():
            self._compare(name, content, stamps[name])

    def settle(self) -> None:
        """Update the statistics with the sums of other writers."""
        fetched, self._fetched = self._fetched, {}
        for name, buckets in fetched.items():
            if (page := self._pages.get(name)) is None:  # it expired meanwhile
                continue
            self._statistics.set_others_of(page.table.name, page.epoch, buckets)

    def read_again(self) -> None:
        """Reread every page at the next exchange: the store may have been replaced."""
        for page in self._pages.values():
            page.stamp = ""

    def _acknowledge(self, page: _Page, push: Push, receipt: Receipt) -> None:
        if push.generation and receipt.generation != push.generation:
            self._lose(page, receipt.generation)
            return
        self.rows_pushed += len(push.rows)
        page.generation, page.batch = receipt
        page.pushed |= page.sent_sums
        page.sent, page.sent_sums = None, {}

    def _compare(self, name: str, content: Content, stamp: str) -> None:
        page = self._pages[name]
        if content.generation != page.generation:
            if page.batch:
                self._lose(page, content.generation)
                return
            page.generation = content.generation
        elif content.batch < page.batch:
            # The store was reset to an older state. A push with a gap in its numbers restarts the page for all writers.
            page.sent = self._push(name, page, {})
            return
        page.stamp = stamp
        self.rows_read += len(content.rows)
        rows = {key: sums for key, sums in content.rows.items() if len(sums) == page.table.width}
        self._fetched[name] = _without(rows, page.pushed)

    def _lose(self, page: _Page, generation: str) -> None:
        self.pages_lost += 1
        page.forget(generation)

    def _push(self, name: str, page: _Page, rows: dict[Key, Sums]) -> Push:
        return Push(name, page.table.end_s(page.epoch), page.generation, page.batch + 1, rows)

    def _page_of(self, row: Row) -> _Page:
        return self._find(f"{self._names[row.table]}.{row.epoch}")

    def _find(self, name: str) -> _Page:
        page = self._pages.get(name)
        if page is None:
            table, _, epoch = name.rpartition(".")
            page = self._pages[name] = _Page(self._tables[table], int(epoch))
        return page

    def _is_current(self, name: str) -> bool:
        """Return whether a page has not expired and belongs to this version of the tables."""
        name, _, epoch = name.rpartition(".")
        table = self._tables.get(name)
        return table is not None and epoch.isdecimal() and table.end_s(int(epoch)) > self._statistics.clock()


def _difference(sums: Mapping[Key, Sums], pushed: Mapping[Key, Sums]) -> dict[Key, Sums]:
    differences: dict[Key, Sums] = {}
    for key, own in sums.items():
        before = pushed.get(key)
        differences[key] = own if before is None else tuple(a - b for a, b in zip(own, before, strict=True))
    return differences


def _without(total: Mapping[Key, Sums], pushed: Mapping[Key, Sums]) -> dict[Key, Sums]:
    """Return the sums of other writers: total - pushed, with rounding errors set to zero."""
    remainder: dict[Key, Sums] = {}
    for key, sums in total.items():
        own = pushed.get(key)
        rest = sums
        if own is not None:
            rest = tuple(a - b if abs(a - b) > _ROUNDING * abs(b) else 0.0 for a, b in zip(sums, own, strict=True))
        if any(rest):
            remainder[key] = rest
    return remainder
