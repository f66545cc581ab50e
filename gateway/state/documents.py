"""Texts with a name that all gateways of a pool know, such as distilled rules and pins: every version is kept."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from gateway.state.store import VERSIONS_KEPT, Document, Store

Watcher = Callable[[Document], None]


class Ask(Protocol):
    """Calls something with the store, in the thread that may wait."""

    def __call__(self, job: Callable[[Store], None]) -> Awaitable[None]:
        """Return when it is done, or raise what it raised; `StateError` if there is no store."""


class Documents:
    """The documents, as this process knows them: what it reads is in memory, and at most two seconds old.

    Called on the event loop, but for `refresh`.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[str, tuple[Document, ...]] = {}
        self._watchers: dict[str, list[Watcher]] = {}
        self._all_again = False

    def get(self, name: str) -> Document | None:
        """Return the present version of a document; None if there is none, or the store was not reached yet."""
        history = self._known.get(name)
        return history[-1] if history else None

    def history(self, name: str) -> tuple[Document, ...]:
        """Return the versions that are kept, the present one last."""
        return self._known.get(name, ())

    async def put(self, name: str, text: str, *, after: int) -> Document:
        """Write a new version of a document, and return it once it is in the store.

        Parameters
        ----------
        after
            The version that it takes the place of: the one that whoever changed it has seen; 0 for a new document.

        Raises
        ------
        Conflict
            If there is a newer one.
        StateError
            If the store cannot be reached, or there is none: nothing is changed then, except where the answer was
            lost, in which case `get` will tell.
        """
        document = Document(name, after + 1, text, time.time())
        await self._ask(lambda store: store.put(document))
        if (known := self.get(name)) is None or known.version < document.version:
            self.settle({name: (*self.history(name), document)[-VERSIONS_KEPT:]})
        return document

    def watch(self, name: str, watcher: Watcher) -> None:
        """Call `watcher` with the present version, if there is one, and with each that comes.

        Whoever watches before the gateway starts has the present version before the first request.
        """
        self._watchers.setdefault(name, []).append(watcher)
        if (document := self.get(name)) is not None:
            watcher(document)

    @property
    def is_watched(self) -> bool:
        """Whether anybody wants to know of a document."""
        return bool(self._watchers)

    def refresh(self, store: Store) -> dict[str, tuple[Document, ...]]:
        """Return the histories that are others than those known, and put back what the store lost; in any thread.

        A store that was wiped or set back gets back the versions that are missing at its end. If somebody has written
        to it since, what it says holds.

        Raises
        ------
        StateError
            If the store does not work.
        """
        changed: dict[str, tuple[Document, ...]] = {}
        versions = store.versions()
        for name, version in versions.items():
            known = self._known.get(name, ())
            if known and known[-1].version == version and not self._all_again:
                continue
            history = tuple(store.history(name))
            if history and known and history[-1] in known[:-1]:
                store.restore(known)
            elif history and history != known:
                changed[name] = history
        for name, known in list(self._known.items()):  # `put` may add one meanwhile
            if name not in versions:
                store.restore(known)
        self._all_again = False
        return changed

    def read_again(self) -> None:
        """Take nothing for known of what stands in the store: it may not be the same one."""
        self._all_again = True

    def settle(self, changed: dict[str, tuple[Document, ...]]) -> None:
        """Take over what `refresh` found, and tell those who watch."""
        for name, history in changed.items():
            before = self.get(name)
            self._known[name] = history
            if history[-1] != before:
                for watcher in self._watchers.get(name, ()):
                    watcher(history[-1])
