"""Named texts shared by all gateways of a pool, such as distilled rules and pins, with their versions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple
from uuid import uuid4

import orjson

from backends import background
from gateway.state.store import Entry, StateError, Store

VERSIONS_KEPT = 50
"""Versions kept of each document."""

_PREFIX = "document/"
_ATTEMPTS = 5


class Document(NamedTuple):
    """One version of a named text."""

    name: str
    version: int  # consecutive number, from 1
    text: str
    written_s: float  # time of writing, in seconds since 1970


History = tuple[Document, ...]
Watcher = Callable[[Document], None]
Ask = Callable[[Callable[[Store], None]], Awaitable[None]]
"""Calls a function with the store in the store's thread; raises `StateError` if there is no store."""


class Conflict(Exception):  # noqa: N818 -- an expected outcome, not an error
    """Raised if another process has changed the document meanwhile."""

    def __init__(self, name: str, version: int) -> None:
        super().__init__(f"{name} already has version {version}")
        self.version = version  # version in the store


class Documents:
    """The process's copy of the documents, in memory and at most two seconds old.

    All methods but `refresh` are called on the event loop.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[str, History] = {}
        self._stamps: dict[str, str] = {}  # of the last reads; used only by `refresh`
        self._watchers: dict[str, list[Watcher]] = {}

    def get(self, name: str) -> Document | None:
        """Return the latest version of a document; None if there is none, or the store has not been reached yet."""
        history = self._known.get(name)
        return history[-1] if history else None

    def history(self, name: str) -> History:
        """Return the stored versions of a document, oldest first."""
        return self._known.get(name, ())

    async def put(self, name: str, text: str, *, after: int) -> Document:
        """Store a new version of a document, and return it."""
        document = Document(name, after + 1, text, time.time())
        await self._ask(lambda store: put_version(store, document))
        if (known := self.get(name)) is None or known.version < document.version:
            self.settle({name: (*self.history(name), document)[-VERSIONS_KEPT:]})
        return document

    def watch(self, name: str, watcher: Watcher) -> None:
        """Call `watcher` with the latest version, if there is one, and with each new one.

        A watcher added before the gateway starts is called before the first request.
        """
        self._watchers.setdefault(name, []).append(watcher)
        if (document := self.get(name)) is not None:
            watcher(document)

    def unwatch(self, name: str) -> None:
        """Remove all watchers of a document."""
        self._watchers.pop(name, None)

    @property
    def is_watched(self) -> bool:
        """Whether any document is watched."""
        return bool(self._watchers)

    def refresh(self, store: Store, stamps: Mapping[str, str]) -> dict[str, History]:
        """Return the histories that changed in the store, and restore those that the store lost; runs in any thread.

        A store that was wiped or reset to an older state gets the latest versions back, unless another process has
        written since.
        """
        known = dict(self._known)  # a copy: `put` may add a document meanwhile
        lost = {_PREFIX + name for name in known} - stamps.keys()
        updated = {name for name in stamps if name.startswith(_PREFIX) and self._stamps.get(name) != stamps[name]}
        entries = store.read(updated | lost) if updated or lost else {}
        changed = {}
        for key in updated | lost:
            name, entry = key.removeprefix(_PREFIX), entries.get(key)
            before = known.get(name, ())
            try:
                history = () if entry is None else _history(name, entry)
            except StateError as error:  # only this one failed: read the others
                background.note("state", error, of=name)
                self._stamps[key] = stamps[key]
                continue
            if before and (key in lost or not history or history[-1] in before[:-1]):
                store.commit({key: "" if entry is None else entry.stamp}, {key: entry_of(before)})
            elif entry is None:  # evicted: without its stamp, processes that know it restore it
                store.commit({key: ""}, {key: None})
            else:
                self._stamps[key] = entry.stamp
                if history and history != before:
                    changed[name] = history
        return changed

    def settle(self, changed: Mapping[str, History]) -> None:
        """Apply the result of `refresh`, and call the watchers."""
        for name, history in changed.items():
            previous = self.get(name)
            self._known[name] = history
            if history[-1] != previous:
                for watcher in self._watchers.get(name, ()):
                    with background.guarded("state", of=name):
                        watcher(history[-1])


def put_version(store: Store, document: Document) -> None:
    """Write the next version of a document."""
    key = _PREFIX + document.name
    version = 0
    for _ in range(_ATTEMPTS):  # an attempt fails if another process writes between reading and writing
        entry = store.read([key]).get(key)
        history = () if entry is None else _history(document.name, entry)
        version = history[-1].version if history else 0
        if version != document.version - 1:
            break
        stamp = "" if entry is None else entry.stamp
        if store.commit({key: stamp}, {key: entry_of((*history, document)[-VERSIONS_KEPT:])}):
            return
    raise Conflict(document.name, version)


def entry_of(history: Sequence[Document]) -> Entry:
    """Return the entry of a document with these versions, oldest first."""
    return Entry(uuid4().hex, orjson.dumps([document[1:] for document in history]))


def _history(name: str, entry: Entry) -> History:
    try:
        return tuple(
            Document(name, int(version), str(text), float(written_s))
            for version, text, written_s in orjson.loads(entry.value)
        )
    except (ValueError, TypeError):
        raise StateError("foreign", f"{name} was not written by the gateway") from None
