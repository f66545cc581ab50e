"""A replay as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

_TIMES = (("e2e_s", "Time to finish"), ("ttft_s", "Time to first token"), ("tpot_s", "Time per output token"))
_QUANTILES = ("mean", "p50", "p90", "p99")


def page(document: Mapping[str, Any]) -> str:
    """Return the page of a replay as HTML.

    Parameters
    ----------
    document
        Document that `gateway replay --json` writes.
    """
    policies: Mapping[str, Mapping[str, Any]] = document["policies"]
    style = (resources.files("lab.report") / "page.css").read_text(encoding="utf-8")
    trace = ", ".join(map(escape, document["trace"]))
    where, names_of = "on simulated replicas", "policy"
    if live := document.get("live"):
        names_of = "endpoint"
        stopped = ", stopped early" if document["interrupted"] else ""
        where = f"sent to {', '.join(map(escape, dict.fromkeys(live.values())))}{stopped}"
    head = (
        f"<header><h1>{escape(document['model'])}</h1><p>gateway replay of {trace}: {document['requests']:,} requests "
        f"after a warm-up of {document['warmup']:,}, seed {document['seed']}, {where}</p></header>"
    )
    body = "".join(_times(policies, name, title, names_of) for name, title in _TIMES)
    body += _shares(policies, names_of) + _notes(policies)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>gateway replay of {trace}</title><style>{style}{_STYLE}</style></head>"
        f"<body><main>{head}{body}</main></body></html>\n"
    )


def _times(policies: Mapping[str, Mapping[str, Any]], name: str, title: str, names_of: str) -> str:
    unit, factor = ("ms", 1e3) if name == "tpot_s" else ("s", 1.0)
    longest = max((figures[name]["p99"] or 0.0 for figures in policies.values()), default=0.0) or 1.0
    rows = []
    for policy, figures in policies.items():
        values = [figures[name][which] for which in _QUANTILES]
        cells = "".join(f"<td>{'-' if value is None else f'{factor * value:.3f}'}</td>" for value in values)
        mean, p99 = (100.0 * (figures[name][which] or 0.0) / longest for which in ("mean", "p99"))
        bars = f'<div class="p99" style="width:{p99:.1f}%"></div><div style="width:{mean:.1f}%"></div>'
        rows.append(f"<tr><th>{escape(policy)}</th>{cells}<td class='bar'>{bars}</td></tr>")
    heads = "".join(f"<th>{which}</th>" for which in _QUANTILES)
    return (
        f"<section><h2>{title}, {unit}</h2><table class='replay'><thead><tr><th>{names_of}</th>{heads}"
        f"<th>mean within p99</th></tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
    )


def _shares(policies: Mapping[str, Mapping[str, Any]], names_of: str) -> str:
    backends = list(dict.fromkeys(backend for figures in policies.values() for backend in figures["shares"]))
    with_regret = any(figures["regret"] is not None for figures in policies.values())
    heads = "".join(f"<th>{escape(backend)}</th>" for backend in backends)
    rows = "".join(
        f"<tr><th>{escape(policy)}</th>"
        + "".join(f"<td>{figures['shares'].get(backend, 0.0):.1%}</td>" for backend in backends)
        + f"<td>{figures['requests']:,}</td><td>{figures['errors']:,}</td>"
        + f"<td>{figures['output_tokens_per_s']:,.0f}</td><td>{figures['goodput']:.2f}</td>"
        + (f"<td>{'-' if figures['regret'] is None else format(figures['regret'], '+.1%')}</td>" if with_regret else "")
        + "</tr>"
        for policy, figures in policies.items()
    )
    return (
        f"<section><h2>Where requests went</h2><table class='replay'><thead><tr><th>{names_of}</th>{heads}"
        "<th>requests</th><th>errors</th><th>tokens/s</th><th>goodput, requests/s</th>"
        f"{'<th>regret</th>' if with_regret else ''}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _notes(policies: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        f"<li>{escape(name)}: {escape(line)}</li>"
        for name, figures in policies.items()
        for line in [
            *(f"{count:,} failed: {kind}" for kind, count in figures.get("failures", {}).items()),
            *figures.get("notes", ()),
        ]
    ]
    return f"<section><h2>Notes</h2><ul>{''.join(lines)}</ul></section>" if lines else ""


_STYLE = """
table.replay { border-collapse: collapse; width: 100%; }
table.replay th, table.replay td { padding: .3em .7em; text-align: right; border-bottom: 1px solid #ddd; }
table.replay th:first-child { text-align: left; background: none; }
td.bar { position: relative; width: 30%; }
td.bar div { position: absolute; left: 0; top: .45em; height: 1em; background: #0072b2; }
td.bar div.p99 { background: #cfe3f1; }
"""
