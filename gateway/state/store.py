"""The interface of a store: named entries, changed atomically if none of them has changed meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

ERRORS = ("unreachable", "timeout", "refused", "full", "unwritable", "corrupt", "foreign", "lost")
"""Kinds of store failures; `lost`: the store no longer held what this process had written."""


class StateError(Exception):
    """Raised if an operation of a store fails."""

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

    Every method raises `StateError` if the store fails or cannot be reached. A commit may still have happened.
    """

    kind: str  # `sqlite` or `redis`: a label in the metrics
    location: str  # path or URL for messages, without passwords

    def stamps(self) -> dict[str, str]:
        """Return the stamps of all entries that have one, by name."""

    def read(self, names: Collection[str]) -> dict[str, Entry]:
        """Return the named entries that exist, without `end_s`."""

    def commit(self, expected: Mapping[str, str], changes: Mapping[str, Entry | None]) -> bool:
        """Write entries, or delete them (None), atomically."""

    def close(self) -> None:
        """Close the connection."""
