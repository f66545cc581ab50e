"""The interface of a store: pages of sums that several processes add to, and versioned documents.

A *page* holds the sums of one table of one model over one epoch. Several processes, the *writers*, add to it, and each
must know its own share of the total.

- A page has a *generation*, a random word chosen when it is created. A writer that finds a different generation has
  lost its share, because the store was wiped or replaced.
- A page counts the batches of each writer. A batch sent again after a lost reply counts once, and a gap in the numbers
  shows that the store was reset to an older state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import orjson

from policies.statistics import Key, Sums

VERSIONS_KEPT = 50
"""Versions kept of each document."""

ERRORS = ("unreachable", "timeout", "refused", "full", "unwritable", "corrupt", "foreign", "lost")
"""Kinds of store failures; `lost` counts pages that disappeared from the store."""


class StateError(Exception):
    """Raised by a failed operation of a store.

    Parameters
    ----------
    kind
        One of `ERRORS`.
    message
        Message for the operator, without passwords.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Conflict(Exception):  # noqa: N818 -- an expected outcome, not an error
    """Raised when a document was changed by another process meanwhile.

    Parameters
    ----------
    version
        Its version in the store.
    """

    def __init__(self, name: str, version: int) -> None:
        super().__init__(f"{name} already has version {version}")
        self.version = version


@dataclass(frozen=True, slots=True)
class Document:
    """One version of a named text.

    Parameters
    ----------
    version
        Consecutive number, from 1.
    written_s
        Time of writing, in seconds since 1970.
    """

    name: str
    version: int
    text: str
    written_s: float


@dataclass(frozen=True, slots=True)
class Push:
    """Sums that one writer adds to one page.

    Parameters
    ----------
    end_s
        Expiry of the page, in seconds since 1970.
    generation
        The generation known to the writer; empty if it has not seen the page, and so has no share in it.
    batch
        Number of this push among the writer's pushes to this generation of the page, from 1.
    rows
        Sums to add, by key.
    """

    page: str
    end_s: float
    generation: str
    batch: int
    rows: Mapping[Key, Sums]


class Receipt(NamedTuple):
    """The store's reply to a push.

    Parameters
    ----------
    generation
        Current generation of the page. If it differs from that of the push, nothing was added and the writer has no
        share in the page.
    batch
        Number of the writer's last push to the page.
    """

    generation: str
    batch: int


class Content(NamedTuple):
    """A page as read by one writer; `generation` and `batch` as in its receipts."""

    generation: str
    batch: int
    rows: dict[Key, Sums]


class Store(Protocol):
    """A store of pages and documents, called from one thread at a time, which may block for a second or two.

    Every method raises `StateError` if the store fails or cannot be reached. The operation may have happened or not.

    Attributes
    ----------
    kind
        `sqlite` or `redis`: a label in the metrics.
    location
        Path or URL for messages, without passwords.
    """

    kind: str
    location: str

    def push(self, model: str, writer: str, pushes: Sequence[Push]) -> list[Receipt]:
        """Add to pages, each atomically; a page that was reset to an older state is deleted and started anew."""

    def stamps(self, model: str) -> dict[str, str]:
        """Return a stamp for each page, which changes with its content."""

    def read(self, model: str, writer: str, pages: Sequence[str]) -> dict[str, Content]:
        """Return the content of those of `pages` that exist."""

    def versions(self) -> dict[str, int]:
        """Return the latest version of each document."""

    def history(self, name: str) -> list[Document]:
        """Return the stored versions of a document, oldest first; empty if there is no such document."""

    def put(self, document: Document) -> None:
        """Write the next version of a document.

        Raises
        ------
        Conflict
            If the stored version is not `document.version - 1`; a document that does not exist has version 0.
        """

    def restore(self, documents: Iterable[Document]) -> None:
        """Restore lost versions of one document, in ascending order; versions that the store has are ignored."""

    def close(self) -> None:
        """Close the connection."""


def write_key(key: Key) -> str:
    """Return the text of a bucket's key, which begins with `[`.

    Examples
    --------
    >>> write_key(("ngram", "chat"))
    '["ngram","chat"]'
    """
    return orjson.dumps(key).decode()


def read_key(text: str | bytes) -> Key:
    """Return the key of a text written by `write_key`.

    Raises
    ------
    StateError
        If the text has another form.
    """
    try:
        key = orjson.loads(text)
    except ValueError:
        key = None
    if not isinstance(key, list) or not all(isinstance(part, str) for part in key):
        raise StateError("foreign", f"not a key written by the gateway: {text!r}")
    return tuple(key)


def write_sums(sums: Sums) -> str:
    """Return a text from which `read_sums` restores the exact sums.

    Examples
    --------
    >>> write_sums((1.0, 0.1))
    '1.0 0.1'
    """
    return " ".join(map(repr, sums))


def read_sums(text: str | bytes) -> Sums:
    """Return the sums of a text written by `write_sums` or by the Redis script.

    Raises
    ------
    StateError
        If the text has another form.
    """
    try:
        return tuple(map(float, text.split()))
    except ValueError:
        raise StateError("foreign", f"not sums written by the gateway: {text!r}") from None
