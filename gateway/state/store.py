"""The interface of a store: named entries, changed together if none of them has changed meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

ERRORS = ("unreachable", "timeout", "refused", "full", "unwritable", "corrupt", "foreign", "lost")
"""Kinds of store failures; `lost` counts how often the store no longer held what this process had written."""


class StateError(Exception):
    """Raised by a failed operation of a store."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind  # one of `ERRORS`


class Entry(NamedTuple):
    """A stored value."""

    stamp: str  # unique word of this version; empty for an entry that `Store.stamps` leaves out
    value: bytes  # the value, opaque to the store
    end_s: float = 0.0  # time at which the entry is dropped, in seconds since 1970; 0 for never


class Store(Protocol):
    """A store of entries, called from one thread at a time, which may block for a second or two.

    Every method raises `StateError` if the store fails or cannot be reached. A commit may have happened then or not.
    """

    kind: str  # `sqlite` or `redis`: a label in the metrics
    location: str  # path or URL for messages, without passwords

    def stamps(self) -> dict[str, str]:
        """Return the stamps of all entries that have one, by name."""

    def read(self, names: Collection[str]) -> dict[str, Entry]:
        """Return those of the named entries that exist; `end_s` is not filled in."""

    def commit(self, expected: Mapping[str, str], changes: Mapping[str, Entry | None]) -> bool:
        """Write entries, or delete them (None), atomically."""

    def close(self) -> None:
        """Close the connection."""
