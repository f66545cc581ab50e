"""Named texts shared by all gateways of a pool, such as distilled rules and pins, with their versions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from gateway.state.store import VERSIONS_KEPT, Document, Store

Watcher = Callable[[Document], None]


class Ask(Protocol):
    """Calls a function with the store, in the thread that may block."""

    def __call__(self, job: Callable[[Store], None]) -> Awaitable[None]:
        """Wait for `job`, and raise what it raises; raise `StateError` if there is no store."""


class Documents:
    """The documents as known to this process: in memory, and at most two seconds old.

    All methods but `refresh` are called on the event loop.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[str, tuple[Document, ...]] = {}
        self._watchers: dict[str, list[Watcher]] = {}
        self._reread_all = False

    def get(self, name: str) -> Document | None:
        """Return the latest version of a document; None if there is none, or the store was not reached yet."""
        history = self._known.get(name)
        return history[-1] if history else None

    def history(self, name: str) -> tuple[Document, ...]:
        """Return the stored versions of a document, oldest first."""
        return self._known.get(name, ())

    async def put(self, name: str, text: str, *, after: int) -> Document:
        """Write a new version of a document, and return it once it is stored.

        Parameters
        ----------
        after
            The version that the change is based on; 0 for a new document.

        Raises
        ------
        Conflict
            If the store has a newer version.
        StateError
            If there is no store or it cannot be reached. The document is then unchanged, unless only the store's reply
            was lost; `get` returns the new version later in that case.
        """
        document = Document(name, after + 1, text, time.time())
        await self._ask(lambda store: store.put(document))
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

    @property
    def is_watched(self) -> bool:
        """Whether any document is watched."""
        return bool(self._watchers)

    def refresh(self, store: Store) -> dict[str, tuple[Document, ...]]:
        """Return the histories that changed in the store, and restore those that the store lost; in any thread.

        A store that was wiped or reset to an older state gets its latest versions back, unless another process has
        written to it since.

        Raises
        ------
        StateError
            If the store fails.
        """
        changed: dict[str, tuple[Document, ...]] = {}
        versions = store.versions()
        for name, version in versions.items():
            known = self._known.get(name, ())
            if known and known[-1].version == version and not self._reread_all:
                continue
            history = tuple(store.history(name))
            if history and known and history[-1] in known[:-1]:
                store.restore(known)
            elif history and history != known:
                changed[name] = history
        for name, known in list(self._known.items()):  # a copy: `put` may add a document meanwhile
            if name not in versions:
                store.restore(known)
        self._reread_all = False
        return changed

    def read_again(self) -> None:
        """Reread every document at the next refresh: the store may have been replaced."""
        self._reread_all = True

    def settle(self, changed: dict[str, tuple[Document, ...]]) -> None:
        """Apply the result of `refresh`, and call the watchers."""
        for name, history in changed.items():
            previous = self.get(name)
            self._known[name] = history
            if history[-1] != previous:
                for watcher in self._watchers.get(name, ()):
                    watcher(history[-1])
