"""Synchronizes a model's statistics with a store: each process writes its own sums, and adds up those of all.

A *page* holds one process's sums of one table over one epoch. A *head* lists the pages of one process, each with a
stamp that changes with its content. Only that process changes them; they expire with their epochs.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from uuid import uuid4

import orjson

from backends import background
from backends.reported import finite
from gateway.state.store import Entry, StateError, Store
from policies.statistics import Key, Statistics, Sums, Table

log = logging.getLogger(__name__)

SKEW_S = 600.0
"""Pages are kept for this long after their end, since clocks of hosts differ."""

_MOST_SUM: Final = 1e24
"""Above any sum of possible observations, yet sums of such values are finite."""

_KIND = "writer"
"""Name prefix of heads."""

_Buckets = dict[Key, Sums]
_Pages = dict[str, tuple[str, float]]
"""Stamp and end, in seconds since 1970, of each page."""


class _Mirror(NamedTuple):
    """What was read from another process: the stamp of its head, and its pages with their stamps."""

    stamp: str
    pages: Mapping[str, tuple[str, bytes]]


class Ledger:
    """Exchanges one model's statistics with a store.

    It works in three steps: `stage` and `settle` in the thread that owns the statistics, `exchange` in any thread. A
    step that fails, or whose outcome is unknown, is retried.
    """

    def __init__(self, model: str, statistics: Statistics, writer: str) -> None:
        self.statistics = statistics
        self._tables = {f"{table.name}.{table.width}.{table.epoch_s:g}": table for table in statistics.tables.values()}
        self._names = {table.name: name for name, table in self._tables.items()}
        self._model = model
        self._head = f"{_KIND}/{writer}/{model}"
        self._changed: set[str] = set()  # own pages to write
        self._pages: _Pages = {}  # own pages in the store, as in the head
        self._stamp = self._attempt = ""  # of its own head: as stored, and in a commit of unknown outcome
        self._mirrors: dict[str, _Mirror] = {}
        self._known: set[str] = set()  # pages with sums of others
        self._unread: set[str] = set()  # tables of other versions, by name in the store
        self._totals: dict[str, _Buckets] = {}  # sums of others, for `settle`
        self.losses = 0

    def stage(self) -> None:
        """Collect the pages that changed since the last call."""
        self._changed |= {f"{self._names[table]}.{epoch}" for table, epoch in self.statistics.take_changed()}

    def exchange(self, store: Store, stamps: Mapping[str, str]) -> None:
        """Write the pages that changed, and read those of others that changed."""
        self._write(store, stamps.get(self._head, ""))
        self._read(store, stamps)

    def settle(self) -> None:
        """Update the statistics with the sums of others."""
        totals, self._totals = self._totals, {}
        for page, buckets in totals.items():
            table, epoch = self._parse(page)
            self.statistics.set_others_of(table.name, epoch, buckets)

    def _write(self, store: Store, stamp: str) -> None:
        self._pages = {page: entry for page, entry in self._pages.items() if self._is_current(page)}
        if stamp not in {self._stamp, self._attempt}:  # the store was wiped or reset
            self.losses += bool(self._pages)
            self._changed |= self._pages.keys()
        self._stamp = stamp
        self._changed = {page for page in self._changed if self._is_current(page)}
        changed = set(self._changed)
        if not changed:
            return
        self._attempt = uuid4().hex
        pages = self._pages | {page: (self._attempt, self._end_s(page) + SKEW_S) for page in changed}
        changes = {page_of(self._head, page): Entry("", self._encoded(page), pages[page][1]) for page in changed}
        last_s = max(end_s for _, end_s in pages.values())
        head = Entry(self._attempt, orjson.dumps(pages), last_s)
        store.commit({}, changes | {self._head: head})
        self._stamp, self._pages = self._attempt, pages
        self._changed -= changed

    def _read(self, store: Store, stamps: Mapping[str, str]) -> None:
        names = {name for name in stamps if self._is_head(name) and name != self._head}
        updated = {page for name in self._mirrors.keys() - names for page in self._mirrors.pop(name).pages}
        mirrors = {name: self._mirrors.get(name, _Mirror("", {})) for name in names}
        news = [name for name in names if mirrors[name].stamp != stamps[name]]
        entries = store.read(news) if news else {}
        heads = {name: self._decode_head(name, entries.get(name)) for name in news}
        wanted = [
            page_of(name, page)
            for name, head in heads.items()
            for page, (stamp, _) in head.items()
            if mirrors[name].pages.get(page, ("",))[0] != stamp
        ]
        values = store.read(wanted) if wanted else {}
        for name, head in heads.items():
            before, pages = mirrors[name].pages, dict[str, tuple[str, bytes]]()
            for page, (stamp, _) in head.items():
                if (entry := values.get(page_of(name, page))) is not None:
                    pages[page] = stamp, entry.value
                elif page in before and before[page][0] == stamp:
                    pages[page] = before[page]
            if name not in entries or pages.keys() != head.keys():  # evicted: without its head, it is rewritten
                store.commit({}, {name: None})
            updated |= {page for page in before.keys() | pages.keys() if before.get(page) != pages.get(page)}
            self._mirrors[name] = _Mirror(stamps[name], pages)
        self._known |= updated
        expired = {page for page in self._known if not self._is_current(page)}
        self._totals |= {page: {} if page in expired else self._total(page) for page in updated | expired}
        self._known -= expired

    def _encoded(self, page: str) -> bytes:
        table, epoch = self._parse(page)
        return orjson.dumps([(row.key, row.sums) for row in self.statistics.own_of(table.name, epoch)])

    def _total(self, page: str) -> _Buckets:
        width = self._parse(page)[0].width
        total: _Buckets = {}
        for head, mirror in sorted(self._mirrors.items()):
            for key, sums in _decode(page_of(head, page), mirror.pages[page][1]) if page in mirror.pages else ():
                if len(sums) == width:
                    total[key] = tuple(map(operator.add, total[key], sums)) if key in total else sums
        return total

    def _is_head(self, name: str) -> bool:
        # The name of a writer contains no slash, but that of a model may.
        kind, _, rest = name.partition("/")
        return kind == _KIND and rest.partition("/")[2] == self._model

    def _parse(self, page: str) -> tuple[Table, int]:
        name, _, epoch = page.rpartition(".")
        return self._tables[name], int(epoch)

    def _end_s(self, page: str) -> float:
        table, epoch = self._parse(page)
        return table.end_s(epoch)

    def _is_current(self, page: str) -> bool:
        """Return whether a page has not expired and belongs to this version of the tables."""
        name, _, epoch = page.rpartition(".")
        return name in self._tables and epoch.isdecimal() and self._end_s(page) > self.statistics.clock()

    def _decode_head(self, name: str, entry: Entry | None) -> _Pages:
        """Return the usable pages of another process; none if its head cannot be read."""
        if entry is None:
            return {}
        try:
            listed = orjson.loads(entry.value)
            pages = {page: (str(stamp), float(end_s)) for page, (stamp, end_s) in listed.items()}
            current = {page: written for page, written in pages.items() if self._is_current(page)}
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
            _set_aside(name, entry.value)
            return {}
        now_s = self.statistics.clock()
        tables = {page.rpartition(".")[0] for page, (_, end_s) in pages.items() if end_s > now_s}
        if unknown := sorted(tables - self._tables.keys() - self._unread):
            self._unread |= {*unknown}
            names, own = ", ".join(unknown), ", ".join(self._tables)
            log.warning(
                "%s: what another version has learned begins anew, since this one keeps it in another form: %s is not "
                "read; this one has %s",
                self._model,
                names,
                own,
            )
        return current


def page_of(head: str, page: str) -> str:
    """Return the stored name of a head's page."""
    return f"page/{page}/{head}"


def _decode(page: str, value: bytes) -> Iterable[tuple[Key, Sums]]:
    try:
        return [(tuple(map(_text, key)), tuple(map(_believed, sums))) for key, sums in orjson.loads(value)]
    except (ValueError, TypeError):
        _set_aside(page, value)
        return ()


def _set_aside(name: str, value: bytes) -> None:
    """Log and count an entry that cannot be read; the others are still read."""
    background.note("state", StateError("foreign", f"{name} was not written by the gateway: {value[:50]!r}"), of=name)


def _text(part: object) -> str:
    if not isinstance(part, str):
        raise ValueError(f"a key with {str(part)[:20]}")  # noqa: TRY004 -- invalid data
    return part


def _believed(number: object) -> float:
    if (believed := finite(number, _MOST_SUM, -_MOST_SUM)) is None:
        raise ValueError(f"a sum of {str(number)[:20]}")
    return believed
