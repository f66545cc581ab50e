"""Reading a report's page: what it may not contain, and the tables in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

_VOID = {"meta", "br"}


class ReportPage(HTMLParser):
    """A page that has been checked.

    Attributes
    ----------
    headings
        Text of the headings of sections.
    tables
        Rows of cells by the title of their table, the headings first.
    drawings
        Each SVG by its title; of equal titles the last.
    text
        All text.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        assert not re.search(r"""<script|(src|href)=|url\(|@import|javascript:""", html)  # self-contained
        assert "default-src 'none'" in html
        self.headings: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.drawings: dict[str, ElementTree.Element] = {}
        self.text = ""
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(html)
        assert not self._open
        for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
            self._check_drawing(ElementTree.fromstring(drawing))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in _VOID:
            self._open.append(tag)
        if given.get("class") == "table":
            assert given["tabindex"] == "0"  # scrolls by keyboard
            self._rows = self.tables.setdefault(str(given["aria-label"]), [])
        if tag == "tr":
            self._rows.append([])
        if tag in {"th", "td"}:
            assert tag == "td" or given["scope"] in {"row", "col"}
            self._rows[-1].append("")
        if tag == "h2":
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] in {"th", "td"}:
            self._rows[-1][-1] += data
        if self._open and self._open[-1] == "h2":
            self.headings[-1] += data

    def _check_drawing(self, root: ElementTree.Element) -> None:
        """Check that a drawing is named, and that nothing sticks out of it or has no position."""
        if root.attrib.get("aria-hidden") == "true":
            return
        assert root.attrib["role"] == "img"
        self.drawings[root.attrib["aria-label"]] = root
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for mark in root.iter("circle"):
            assert 0 <= float(mark.attrib["cx"]) <= width
            assert 0 <= float(mark.attrib["cy"]) <= height
        for bar in root.iter("rect"):
            x, y, wide, high = (float(bar.attrib[name]) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width + 1
            assert 0 <= y <= y + high <= height
        for path in root.iter("path"):
            numbers = [float(text) for text in re.findall(r"-?\d+\.?\d*|nan|inf", path.attrib["d"])]
            assert all(-1 <= one <= width + 1 for one in numbers)
