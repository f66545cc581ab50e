"""No sentence of the documentation is longer than a reader can hold, and no table is cut in two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import DOCS, ROOT

MOST_WORDS = 30
PAGES = [
    ROOT / "README.md",
    ROOT / "deploy/README.md",
    *sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "reference"),
]
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S.*\n(?: {4}.*\n|\n(?= {4}))*)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]*\)")
_CODE = re.compile(r"`[^`]+`")
_CUT = re.compile(r"^\|.*\n\n\|.*\n(?!\|-)", re.MULTILINE)  # an empty line, and a row that is no head
_BEGIN = re.compile(r"^\s*(?:[-*] |\d+\. |#+ |\||$)", re.MULTILINE)
_END = re.compile(r"(?<=[.!?])[)*\"']*\s+(?=[^a-z]|vLLM|nginx)")


def sentences(page: str) -> Iterator[str]:
    """Return the sentences of a page outside of code, tables and comments: what stands in backquotes is one word."""
    text = _COMMENT.sub("", _FENCE.sub("\n\n", page))
    text = _CODE.sub("CODE", _LINK.sub(r"\1", _INDENTED.sub("\n\n", text)))
    starts = [match.start() for match in _BEGIN.finditer(text)]
    for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
        block = text[start:end].strip()
        if not block.startswith("|"):
            yield from _END.split(" ".join(block.split()))


def long_sentences(page: str) -> list[tuple[int, str]]:
    counted = ((len(re.findall(r"\S*\w\S*", sentence)), sentence) for sentence in sentences(page))
    return [(words, sentence) for words, sentence in counted if words > MOST_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_too_long(page: Path) -> None:
    found = [f"{words} words: {sentence}" for words, sentence in long_sentences(page.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_table_is_cut(page: Path) -> None:
    assert not _CUT.findall(_FENCE.sub("", page.read_text("utf-8")))
