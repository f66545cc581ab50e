"""The skeleton of all reports: one HTML file without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from lab.report.charts import swatch

# The browser may load nothing for the page, even if a name in it got past `escape`.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(title: str, heading: str, facts: Sequence[str], body: Iterable[str]) -> str:
    """Return the page."""
    tokens = resources.files("gateway") / "rooms" / "dashboard" / "static" / "tokens.css"
    style = tokens.read_text("utf-8") + (resources.files("lab.report") / "page.css").read_text("utf-8")
    head = "".join(f"<p>{escape(fact)}</p>" for fact in facts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><header><h1>{escape(heading)}</h1>{head}</header><main>{''.join(body)}</main></body></html>\n"
    )


def section(title: str, *parts: str, note: str = "") -> str:
    """Return a section; empty without content."""
    content = "".join(parts)
    said = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{content}</section>" if content else ""


def figure(title: str, chart: str, data: str) -> str:
    """Return a chart with its title and a table that opens on a click."""
    shown = f"<details><summary>As a table</summary>{data}</details>"
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}{shown}</figure>"


def figures(*drawn: str) -> str:
    """Return charts, side by side where there is room; empty without any."""
    some = [one for one in drawn if one]
    css = "figures three" if len(some) % 3 == 0 else "figures"
    return f'<div class="{css}">{"".join(some)}</div>' if some else ""


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], marks: Iterable[str] = ()) -> str:
    """Return a table that scrolls sideways; the first column names the rows."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    classes = iter(marks)
    body = ""
    for name, *cells in rows:
        body += (
            f'<tr><th scope="row">{escape(name)}</th>'
            + "".join(_cell(cell, next(classes, "")) for cell in cells)
            + "</tr>"
        )
    label = escape(title, quote=True)
    return (
        f'<div class="table" role="group" tabindex="0" aria-label="{label}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(words: str, mark: str) -> str:
    return f'<td class="{mark}">{escape(words)}</td>' if mark else f"<td>{escape(words)}</td>"


def legend(entries: Iterable[tuple[str, str, int]], title: str) -> str:
    """Return a legend of lines: label, color and dash pattern of each."""
    items = "".join(f"<li>{swatch(color, dash)}{escape(label)}</li>" for label, color, dash in entries)
    return f'<ul class="legend" aria-label="{escape(title, quote=True)}">{items}</ul>'
