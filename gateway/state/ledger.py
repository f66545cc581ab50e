"""Synchronisation of a model's statistics with a store: each process writes its own sums, and adds up those of all.

A *page* holds one process's sums of one table over one epoch. A *head* lists the pages of one process, the *writer*,
each with a stamp that changes with its content. Only the writer changes its pages. Others fold them into the pages of
`_GONE` when its head has not changed for a while; the head then holds the folded sums, which the writer leaves out of
its pages if it comes back.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple
from uuid import uuid4

import orjson

from backends.reported import finite
from gateway.state.store import Entry, StateError, Store
from policies.statistics import Key, Statistics, Sums, Table

HEARTBEAT_S = 30.0
"""A writer changes its head at least this often."""

GONE_S = 150.0
"""A writer whose head has not changed for this long is folded."""

_SKEW_S = 600.0
"""Pages are stored for so long after their end, since clocks of hosts differ."""

_MOST_SUM: Final = 1e24
"""Beyond the largest sum of as many observations as there can be, and such that sums of these are finite."""

_GONE = "gone"
_PREFIX = "sums/"
_Buckets = dict[Key, Sums]


class _Head(NamedTuple):
    """A writer's head."""

    pages: dict[str, tuple[str, float]]  # stamp and end, in seconds since 1970, of each page
    # Sums of the writer that `_GONE` contains, by page, as rows of key and sums.
    folded: dict[str, list[tuple[Key, Sums]]]


class _Mirror(NamedTuple):
    """What was read of another writer: the stamp of its head, when that was new, and its pages with their stamps."""

    stamp: str
    since_s: float
    pages: Mapping[str, tuple[str, bytes]]


class Ledger:
    """Exchanges one model's statistics with a store.

    Called in three steps: `stage` and `settle` in the thread that owns the statistics, `exchange` in any thread. A step
    that fails, or whose outcome is unknown, is repeated.
    """

    def __init__(
        self, model: str, statistics: Statistics, writer: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._statistics = statistics
        self._monotonic = monotonic  # clock in seconds that tells when other writers are gone
        self._tables = {f"{table.name}.{table.width}.{table.epoch_s:g}": table for table in statistics.tables.values()}
        self._names = {table.name: name for name, table in self._tables.items()}
        self._suffix = f"/{model}"
        self._head = self._head_of(writer)
        self._changed: set[str] = set()  # own pages to write
        self._pages: dict[str, tuple[str, float]] = {}  # own pages in the store, as in the head
        self._folded: dict[str, _Buckets] = {}
        self._stamp = self._attempt = ""  # of the own head: as stored, and in a commit of unknown outcome
        self._must_restore = False
        self._exchanged_s = self._written_s = 0.0
        self._mirrors: dict[str, _Mirror] = {}
        self._totals: dict[str, _Buckets] = {}  # of other writers, for `settle`
        self._known: set[str] = set()  # pages with sums of others
        self._updated: set[str] = set()  # those whose total is out of date
        self.pages_written = 0
        self.pages_read = 0
        self.losses = 0

    def stage(self) -> None:
        """Collect the pages that changed since the last call."""
        self._changed |= {f"{self._names[table]}.{epoch}" for table, epoch in self._statistics.take_changed()}

    def exchange(self, store: Store, stamps: Mapping[str, str]) -> None:
        """Write the pages that changed, and read those of others that changed."""
        now_s = self._monotonic()
        self._write(store, stamps.get(self._head, ""), now_s)
        self._read(store, stamps, now_s)
        if now_s - self._exchanged_s > HEARTBEAT_S:  # the store was out of reach, for other writers too
            self._mirrors = {head: mirror._replace(since_s=now_s) for head, mirror in self._mirrors.items()}
        self._exchanged_s = now_s
        for head, mirror in self._mirrors.items():
            if now_s - mirror.since_s > GONE_S and head != self._head_of(_GONE):
                self._mirrors[head] = mirror._replace(since_s=now_s)
                self._fold(store, head, mirror.stamp)
                break  # one at a time

    def settle(self) -> None:
        """Update the statistics with the sums of other writers."""
        totals, self._totals = self._totals, {}
        for page, buckets in totals.items():
            table, epoch = self._parse(page)
            self._statistics.set_others_of(table.name, epoch, buckets)

    def _write(self, store: Store, stamp: str, now_s: float) -> None:
        self._pages = {page: entry for page, entry in self._pages.items() if self._is_current(page)}
        self._changed = {page for page in self._changed if self._is_current(page)}
        if stamp and stamp == self._attempt:
            self._stamp = stamp
        elif stamp != self._stamp:  # the store was wiped or set back, or our sums were folded
            self.losses += bool(self._pages) and not self._must_restore
            self._must_restore = True
        changed = self._changed | self._pages.keys() if self._must_restore else self._changed
        if not changed and (not self._pages or now_s - self._written_s < HEARTBEAT_S):
            return
        if self._must_restore:
            entry = store.read([self._head]).get(self._head)
            stamp = "" if entry is None else entry.stamp
            self._updated |= self._folded.keys()
            folded = _decode_head(entry).folded
            self._folded = {page: _buckets(rows) for page, rows in folded.items() if self._is_current(page)}
            self._updated |= self._folded.keys()
        self._attempt = uuid4().hex
        pages = self._pages | {page: (self._attempt, self._end_s(page) + _SKEW_S) for page in changed}
        changes = {self._page(self._head, page): Entry("", self._encoded(page), pages[page][1]) for page in changed}
        head = _Head(pages, {page: [*rows.items()] for page, rows in self._folded.items()})
        if store.commit({self._head: stamp}, changes | {self._head: _head_entry(self._attempt, head)}):
            self._stamp, self._pages, self._written_s = self._attempt, pages, now_s
            self._changed = set()
            self.pages_written += len(changed)
        self._must_restore = self._stamp != self._attempt

    def _read(self, store: Store, stamps: Mapping[str, str], now_s: float) -> None:
        names = {name for name in stamps if self._is_head(name) and name != self._head}
        for name in self._mirrors.keys() - names:
            self._updated |= self._mirrors.pop(name).pages.keys()
        mirrors = {name: self._mirrors.get(name, _Mirror("", now_s, {})) for name in names}
        news = [name for name in names if mirrors[name].stamp != stamps[name]]
        entries = store.read(news) if news else {}
        heads = {name: _decode_head(entries.get(name)) for name in news}
        wanted = [
            self._page(name, page)
            for name, head in heads.items()
            for page, (stamp, _) in head.pages.items()
            if self._is_current(page) and mirrors[name].pages.get(page, ("",))[0] != stamp
        ]
        values = store.read(wanted) if wanted else {}
        self.pages_read += len(values)
        for name, head in heads.items():
            before, pages = mirrors[name].pages, dict[str, tuple[str, bytes]]()
            for page, (stamp, _) in head.pages.items():
                if (entry := values.get(self._page(name, page))) is not None:
                    pages[page] = stamp, entry.value
                elif page in before and before[page][0] == stamp:
                    pages[page] = before[page]
            missing = {page for page in head.pages.keys() - pages.keys() if self._is_current(page)}
            if missing or name not in entries:
                _report_evicted(store, name, entries.get(name), missing)
            self._updated |= {page for page in before.keys() | pages.keys() if before.get(page) != pages.get(page)}
            self._mirrors[name] = _Mirror(stamps[name], now_s, pages)
        self._known |= self._updated
        expired = {page for page in self._known if not self._is_current(page)}
        self._totals |= {page: {} if page in expired else self._total(page) for page in self._updated | expired}
        self._known -= expired
        self._updated = set()

    def _fold(self, store: Store, name: str, stamp: str) -> None:
        """Add a writer's pages to those of `_GONE`, unless one of the two has changed meanwhile."""
        gone = self._head_of(_GONE)
        entries = store.read([name, gone])
        head, total = _decode_head(entries.get(name)), _decode_head(entries.get(gone))
        if not head.pages or entries[name].stamp != stamp:
            return
        pages = {page: entry for page, entry in total.pages.items() if entry[1] > self._statistics.clock()}
        values = store.read([self._page(owner, page) for owner in (name, gone) for page in head.pages])
        expected = {name: stamp, gone: entries[gone].stamp if gone in entries else ""}
        changes: dict[str, Entry | None] = {}
        stamp = uuid4().hex
        for page, (_, end_s) in head.pages.items():
            pages[page] = stamp, end_s
            names = [self._page(owner, page) for owner in (name, gone)]
            own, others = [_decode(values[each].value) if each in values else {} for each in names]
            changes |= {names[0]: None, names[1]: Entry("", _encode(_sum([own, others])), end_s)}
            head.folded[page] = [*_sum([own, _buckets(head.folded.get(page, ()))]).items()]
        last_s = max(end_s for _, end_s in head.pages.values())
        changes[name] = _head_entry(stamp, _Head({}, head.folded), last_s)
        changes[gone] = _head_entry(stamp, _Head(pages, {}))
        store.commit(expected, changes)

    def _encoded(self, page: str) -> bytes:
        table, epoch = self._parse(page)
        own = {row.key: row.sums for row in self._statistics.own_of(table.name, epoch)}
        return _encode(self._without_folded(page, own))

    def _total(self, page: str) -> _Buckets:
        width = self._parse(page)[0].width
        values = [mirror.pages[page][1] for _, mirror in sorted(self._mirrors.items()) if page in mirror.pages]
        total = _sum(_decode(value) for value in values)
        return self._without_folded(page, {key: sums for key, sums in total.items() if len(sums) == width})

    def _without_folded(self, page: str, buckets: _Buckets) -> _Buckets:
        """Return sums without those of this process that `_GONE` contains."""
        for key, folded in self._folded.get(page, {}).items():
            if key in buckets:
                buckets[key] = tuple(map(operator.sub, buckets[key], folded))
        return buckets

    def _head_of(self, writer: str) -> str:
        return f"{_PREFIX}{writer}{self._suffix}"

    def _is_head(self, name: str) -> bool:
        # The name of a writer contains no slash, but that of a model may.
        return name.startswith(_PREFIX) and name[name.find("/", len(_PREFIX)) :] == self._suffix

    def _page(self, head: str, page: str) -> str:
        return f"page/{page}/{head}"

    def _parse(self, page: str) -> tuple[Table, int]:
        name, _, epoch = page.rpartition(".")
        return self._tables[name], int(epoch)

    def _end_s(self, page: str) -> float:
        table, epoch = self._parse(page)
        return table.end_s(epoch)

    def _is_current(self, page: str) -> bool:
        """Return whether a page has not expired and belongs to this version of the tables."""
        name, _, epoch = page.rpartition(".")
        return name in self._tables and epoch.isdecimal() and self._end_s(page) > self._statistics.clock()


def _report_evicted(store: Store, name: str, entry: Entry | None, missing: Collection[str]) -> None:
    """Change the head of a writer that lacks pages, or remove its stamp if it is missing, so that they are restored."""
    if entry is None:
        store.commit({name: ""}, {name: None})
        return
    pages, folded = _decode_head(entry)
    last_s = max(end_s for _, end_s in pages.values())
    kept = {page: pages[page] for page in pages.keys() - missing}
    store.commit({name: entry.stamp}, {name: _head_entry(uuid4().hex, _Head(kept, folded), last_s)})


def _encode(buckets: Mapping[Key, Sums]) -> bytes:
    return orjson.dumps([*buckets.items()])


def _head_entry(stamp: str, head: _Head, end_s: float = 1.0) -> Entry:
    """Return the entry of a head, which ends with its last page and not before `end_s`."""
    return Entry(stamp, orjson.dumps(tuple(head)), max([end_s, *(end_s for _, end_s in head.pages.values())]))


def _decode_head(entry: Entry | None) -> _Head:
    if entry is None:
        return _Head({}, {})
    try:
        pages, folded = orjson.loads(entry.value)
        return _Head(
            {page: (str(stamp), float(end_s)) for page, (stamp, end_s) in pages.items()},
            {page: [*_buckets(rows).items()] for page, rows in folded.items()},
        )
    except (ValueError, TypeError, AttributeError):
        raise StateError("foreign", f"not written by the gateway: {entry.value[:50]!r}") from None


def _decode(value: bytes) -> _Buckets:
    try:
        return _buckets(orjson.loads(value))
    except (ValueError, TypeError):
        raise StateError("foreign", f"not sums written by the gateway: {value[:50]!r}") from None


def _buckets(rows: Iterable[tuple[Iterable[str], Iterable[float]]]) -> _Buckets:
    return {tuple(key): tuple(map(_believed, sums)) for key, sums in rows}


def _believed(number: object) -> float:
    if (believed := finite(number, _MOST_SUM, -_MOST_SUM)) is None:
        raise ValueError(f"a sum of {str(number)[:20]}")
    return believed


def _sum(parts: Iterable[Mapping[Key, Sums]]) -> _Buckets:
    total: _Buckets = {}
    for part in parts:
        for key, sums in part.items():
            before = total.get(key)
            total[key] = sums if before is None else tuple(map(operator.add, before, sums))
    return total
