"""What of a model's experience is in the store, and what is still to be put there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.state.store import Content, Push, Receipt, Store
from policies.statistics import Key, Row, Statistics, Sums, Table

_ROUNDING = 1e-9
"""What is left of a sum when ours is taken from it, relative to it, is nobody's if it is no more than this."""


@dataclass(slots=True)
class _Page:
    """One table and epoch, as this writer knows it.

    Parameters
    ----------
    generation
        Of the page in the store that `batch` and `pushed` speak of; empty if it was not seen yet.
    batch
        Number of our last push that is known to be there.
    pushed
        Our sums that are there.
    changed
        Our sums that are to go there with the next push.
    sent
        A push on its way, or one of which it is not known whether it arrived, and `sent_sums`, which it makes ours.
    stamp
        Of the content that was last read.
    lost
        True if all of ours must be pushed again.
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
        """Know that nothing of ours is in the store."""
        self.generation = generation
        self.batch = 0
        self.pushed, self.changed, self.sent_sums = {}, {}, {}
        self.sent = None
        self.stamp = ""
        self.lost = True


class Ledger:
    """Exchanges one model's experience with a store, counting nothing twice.

    Three steps, to be called in turn: `stage` and `settle` where the experience may be touched, `exchange` in any
    thread. A step that fails, or is not known to have succeeded, is simply taken again.

    Parameters
    ----------
    writer
        A word that no other process has, now or earlier.
    """

    def __init__(self, model: str, statistics: Statistics, writer: str) -> None:
        self.model = model
        self._experience = statistics
        self._writer = writer
        self._tables = {f"{table.name}.{table.width}.{table.epoch_s:g}": table for table in statistics.tables.values()}
        self._names = {table.name: name for name, table in self._tables.items()}
        self._pages: dict[str, _Page] = {}
        self._others: dict[str, dict[Key, Sums]] = {}
        self.rows_pushed = 0
        self.rows_read = 0
        self.pages_lost = 0

    def stage(self) -> None:
        """Take what was observed since the last time, and make ready what is to be pushed."""
        now_s = self._experience.clock()
        for name, page in [*self._pages.items()]:
            if page.table.end_s(page.epoch) <= now_s:
                self._experience.set_others_of(page.table.name, page.epoch, {})
                del self._pages[name]
        for row in self._experience.take_changed():
            self._page_of(row).changed[row.key] = row.sums
        for name, page in self._pages.items():
            if page.lost:
                page.changed = {row.key: row.sums for row in self._experience.own_of(page.table.name, page.epoch)}
                page.lost = False
            if page.changed and page.sent is None:
                page.sent_sums, page.changed = page.changed, {}
                page.sent = self._push(name, page, _difference(page.sent_sums, page.pushed))

    def exchange(self, store: Store) -> None:
        """Push what is ready, and read what others have pushed.

        Raises
        ------
        StateError
            If the store does not work.
        """
        staged = [(page, page.sent) for page in self._pages.values() if page.sent is not None]
        receipts = store.push(self.model, self._writer, [push for _, push in staged]) if staged else []
        for (page, push), receipt in zip(staged, receipts, strict=True):
            self._acknowledge(page, push, receipt)
        stamps = store.stamps(self.model)
        for name, page in self._pages.items():
            if page.batch and name not in stamps:
                self._lose(page, "")
        fresh = [name for name, stamp in stamps.items() if self._is_ours(name) and self._find(name).stamp != stamp]
        for name, content in store.read(self.model, self._writer, fresh).items() if fresh else ():
            self._compare(name, content, stamps[name])

    def settle(self) -> None:
        """Tell the experience what others have observed."""
        others, self._others = self._others, {}
        for name, buckets in others.items():
            if (page := self._pages.get(name)) is None:  # its time has come meanwhile
                continue
            self._experience.set_others_of(page.table.name, page.epoch, buckets)

    def read_again(self) -> None:
        """Take nothing for known of what stands in the store: it may not be the same one."""
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
            # The store was set back. A push that comes too soon lets it begin the page again, for every writer.
            page.sent = self._push(name, page, {})
            return
        page.stamp = stamp
        self.rows_read += len(content.rows)
        rows = {key: sums for key, sums in content.rows.items() if len(sums) == page.table.width}
        self._others[name] = _without(rows, page.pushed)

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

    def _is_ours(self, name: str) -> bool:
        """Return whether a page is one that still counts; those of other versions of the tables do not."""
        name, _, epoch = name.rpartition(".")
        table = self._tables.get(name)
        return table is not None and epoch.isdecimal() and table.end_s(int(epoch)) > self._experience.clock()


def _difference(sums: Mapping[Key, Sums], pushed: Mapping[Key, Sums]) -> dict[Key, Sums]:
    differences: dict[Key, Sums] = {}
    for key, own in sums.items():
        before = pushed.get(key)
        differences[key] = own if before is None else tuple(a - b for a, b in zip(own, before, strict=True))
    return differences


def _without(total: Mapping[Key, Sums], pushed: Mapping[Key, Sums]) -> dict[Key, Sums]:
    """Return what others have of a total; sums that rounding alone leaves over are zero."""
    others: dict[Key, Sums] = {}
    for key, sums in total.items():
        own = pushed.get(key)
        rest = sums
        if own is not None:
            rest = tuple(a - b if abs(a - b) > _ROUNDING * abs(b) else 0.0 for a, b in zip(sums, own, strict=True))
        if any(rest):
            others[key] = rest
    return others
