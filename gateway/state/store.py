"""What a store is: pages of sums that several processes add to, and documents of which every version is kept.

A *page* holds the sums of one table of one model over one epoch of time. Several processes, the *writers*, add to it at
once, and each must be able to tell what of it is its own. So a page has a *generation*, a word made up when it is
begun: a writer that finds another one than it knows knows that what it had added is gone, whoever wiped it and why.
And it counts the batches of each writer: one that is sent again, because its answer was lost, counts once; and a store
that was set back to an older state is found out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import orjson

from policies.statistics import Key, Sums

VERSIONS_KEPT = 50
"""Of each document; older ones are dropped."""

ERRORS = ("unreachable", "timeout", "refused", "full", "unwritable", "corrupt", "foreign", "lost")
"""Kinds of trouble with a store; the last is counted where something that was there is gone."""


class StateError(Exception):
    """A store that does not do what it was asked to.

    Parameters
    ----------
    kind
        One of `ERRORS`.
    message
        For a person; without passwords.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Conflict(Exception):  # noqa: N818 -- nothing is wrong: somebody else was faster
    """A document was changed by somebody else meanwhile.

    Parameters
    ----------
    version
        The one that it has now.
    """

    def __init__(self, name: str, version: int) -> None:
        super().__init__(f"{name} has version {version} by now")
        self.version = version


@dataclass(frozen=True, slots=True)
class Document:
    """One version of a text with a name.

    Parameters
    ----------
    version
        From 1; each change has the next.
    written_s
        When it was written, in seconds since 1970.
    """

    name: str
    version: int
    text: str
    written_s: float


@dataclass(frozen=True, slots=True)
class Push:
    """What one writer adds to one page.

    Parameters
    ----------
    end_s
        When the page may be forgotten, in seconds since 1970.
    generation
        The one the writer knows; empty if it has not seen the page, and so has nothing in it.
    batch
        Number of this push among the writer's to this page in this generation, from 1.
    """

    page: str
    end_s: float
    generation: str
    batch: int
    rows: Mapping[Key, Sums]


class Receipt(NamedTuple):
    """What a page says to a push.

    Parameters
    ----------
    generation
        Of the page now. If it is not the one of the push, nothing was added, and nothing of this writer's is there.
    batch
        Number of the writer's last push that is in the page.
    """

    generation: str
    batch: int


class Content(NamedTuple):
    """A page as one writer reads it; `batch` as in its receipts."""

    generation: str
    batch: int
    rows: dict[Key, Sums]


class Store(Protocol):
    """Somewhere to keep things; called from one thread at a time, which may have to wait a second or two.

    Every call raises `StateError` where the store cannot be reached or does not work; what it was to do may then have
    been done or not.

    Attributes
    ----------
    kind
        `sqlite` or `redis`: a label in the metrics.
    place
        Where it is, for a person; without passwords.
    """

    kind: str
    place: str

    def push(self, model: str, writer: str, pushes: Sequence[Push]) -> list[Receipt]:
        """Add to pages, each in one go or not at all; a page that was set back is begun again, empty."""

    def stamps(self, model: str) -> dict[str, str]:
        """Return a word for each page that is another one whenever its content is."""

    def read(self, model: str, writer: str, pages: Sequence[str]) -> dict[str, Content]:
        """Return what stands in those of `pages` that exist."""

    def versions(self) -> dict[str, int]:
        """Return the present version of each document."""

    def history(self, name: str) -> list[Document]:
        """Return the versions of a document that are kept, the present one last; none if there is no such document."""

    def put(self, document: Document) -> None:
        """Write the next version of a document.

        Raises
        ------
        Conflict
            If the present one is not that before `document.version`; 0 stands for a document that does not exist.
        """

    def restore(self, documents: Iterable[Document]) -> None:
        """Put back versions of one document, in ascending order, that the store lost; it takes those above its own."""

    def close(self) -> None:
        """Let go of it."""


def write_key(key: Key) -> str:
    """Write a cell's key as a text that begins with `[`."""
    return orjson.dumps(key).decode()


def read_key(text: str | bytes) -> Key:
    """Read what `write_key` wrote.

    Raises
    ------
    StateError
        If it was not written by it.
    """
    try:
        key = orjson.loads(text)
    except ValueError:
        key = None
    if not isinstance(key, list) or not all(isinstance(part, str) for part in key):
        raise StateError("foreign", f"not a key of ours: {text!r}")
    return tuple(key)


def write_sums(sums: Sums) -> str:
    """Write sums so that they are read back to the last bit."""
    return " ".join(map(repr, sums))


def read_sums(text: str | bytes) -> Sums:
    """Read what `write_sums`, or the script in Redis, wrote.

    Raises
    ------
    StateError
        If it was not written by it.
    """
    try:
        return tuple(map(float, text.split()))
    except ValueError:
        raise StateError("foreign", f"not sums of ours: {text!r}") from None
