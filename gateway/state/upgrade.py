"""What the first format of the state held, as entries of the present one.

It had documents, and pages to which several processes added. Those become the pages of one writer that is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import uuid4

import orjson

from gateway.state.documents import Document, entry_of, name_of
from gateway.state.ledger import head_of, page_of
from gateway.state.store import Entry

_WRITER = "format-1"
Cell = tuple[str, str, float, str | bytes, str | bytes]
"""Model, page, end of the page in seconds since 1970, key as JSON, sums with spaces between them."""


def entries_of_first(documents: Iterable[Document], cells: Iterable[Cell]) -> dict[str, Entry]:
    """Return the entries; raise `ValueError` for what the first format did not hold."""
    histories: dict[str, list[Document]] = {}
    for document in documents:
        histories.setdefault(name_of(document.name), []).append(document)
    pages: dict[tuple[str, str, float], list[tuple[object, list[float]]]] = {}
    for model, page, end_s, key, sums in cells:
        pages.setdefault((model, page, end_s), []).append((orjson.loads(key), [*map(float, sums.split())]))
    entries = {name: entry_of(history) for name, history in histories.items()}
    heads: dict[str, dict[str, tuple[str, float]]] = {}
    stamp = uuid4().hex
    for (model, page, end_s), rows in pages.items():
        head = head_of(_WRITER, model)
        entries[page_of(head, page)] = Entry("", orjson.dumps(rows), end_s)
        heads.setdefault(head, {})[page] = stamp, end_s
    for head, listed in heads.items():
        entries[head] = Entry(stamp, orjson.dumps(listed), max(end_s for _, end_s in listed.values()))
    return entries


def summary(entries: Iterable[str]) -> str:
    """Return what entries hold, for the log.

    Examples
    --------
    >>> summary(["document/llama/pin", "page/length.3.1800.7/writer/format-1/llama", "writer/format-1/llama"])
    'llama/pin, what was learned of llama'
    """
    names = sorted(entries)
    documents = [name.removeprefix(name_of("")) for name in names if name.startswith(name_of(""))]
    heads = [name.removeprefix(head_of(_WRITER, "")) for name in names if name.startswith(head_of(_WRITER, ""))]
    return ", ".join([*documents, *(f"what was learned of {model}" for model in heads)]) or "nothing"
