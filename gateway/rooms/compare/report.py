"""The result of a comparison, as a page to send on; for depths, the best one by load."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Final

import numpy as np

from backends.backend import Backend
from backends.speculation import SCHEDULE_KEY, Method
from policies.experiment.verdict import CERTAIN, SHOWN, Stage
from policies.learned.prior import expected_step

Ranges = list[list[int]]
"""First and last number of requests in a batch, and the depth."""


_TOKENS: Final = "num_speculative_tokens"
_WIDTH, _HEIGHT, _MARGIN = 640, 240, 48
_FIGURES: Final = {
    "requests": "requests",
    "request_s": "seconds a request",
    "ttft_s": "seconds to the first token",
    "tpot_s": "seconds a token after it",
    "tokens_per_replica_s": "tokens/s asked of a replica",
    "failed": "failed",
    "missed": "share that missed its objective",
}


def lines_of(document: Mapping[str, Any], better: str) -> str:
    """Return the lines to paste: as measured and, for a draft model, as it would be once configured.

    If another depth than the better one was harmed, it may have been faster, so loads are not distinguished.
    """
    if document.get("harmed"):
        return _option([[1, 1, document["depths"][[*document["arms"]].index(better)]]])
    loads = [point["in_flight"] for point in document["findings"][0]["curve"]]
    seen = f"# for {loads[0]:.0f} to {loads[-1]:.0f} requests in flight per replica, as seen"
    lines = [seen, _option(_best(document))]
    if (drafter := document.get("drafter")) is not None:
        passes = f"made all {drafter['k']} passes at each depth"
        lines.append(f"# its drafter {passes}: once configured, a smaller one is faster")
        if drafter["calibration"]:
            lines.append(f"# by the passes of the calibration {drafter['calibration']}, then")
            lines.append(_option(_best(document, drafter)))
    return "\n".join(lines)


def configured(drafter: Mapping[str, Any], depth: int, in_flight: float) -> float:
    """Return the ratio of step times of an engine started with a depth to one that is asked for it per request.

    Examples
    --------
    >>> round(configured({"method": "eagle3", "k": 5, "calibration": "llama-3.1-8b-h100"}, 1, 8.0), 2)
    0.79
    """
    method, calibration = Method(drafter["method"]), drafter["calibration"]
    own = expected_step(calibration, method, depth)
    cut = expected_step(calibration, method, drafter["k"], verified_drafts=depth)
    seconds = [each.base_s + in_flight * each.per_request_s for each in (own, cut)]
    return seconds[0] / seconds[1]


def _best(document: Mapping[str, Any], drafter: Mapping[str, Any] | None = None) -> Ranges:
    """Return the best depth by load; one other than the best on average only where it is certainly better."""
    depths = dict(zip(document["arms"], document["depths"], strict=True))
    findings = document["findings"]
    best = depths[findings[0]["better"]]
    curves = [each["curve"] for each in findings]  # each over the loads that both of its arms have seen
    works = [[point["work_per_s"] for point in curve] for curve in curves]
    lows = [
        np.interp(works[0], own, [point["low"] for point in curve]) for own, curve in zip(works, curves, strict=True)
    ]
    by_batch: dict[int, int] = {}
    for at, load in enumerate(point["in_flight"] for point in findings[0]["curve"]):
        chosen, least = best, 1.0
        for each, low in zip(findings, lows, strict=True):
            other = depths[each["other"]]
            factor = 1.0 if drafter is None else configured(drafter, other, load) / configured(drafter, best, load)
            if factor / low[at] < least:
                chosen, least = other, factor / low[at]
        batch = max(1, round(load))
        by_batch[batch] = chosen if by_batch.get(batch, chosen) == chosen else best
    ranges: Ranges = []
    for batch, chosen in sorted(by_batch.items()):
        if ranges and ranges[-1][2] == chosen:
            ranges[-1][1] = batch
        else:
            ranges.append([1 if not ranges else ranges[-1][1] + 1, batch, chosen])
    return ranges


def _option(ranges: Ranges) -> str:
    key, value = (_TOKENS, ranges[0][2]) if len(ranges) == 1 else (SCHEDULE_KEY, ranges)
    return f"--speculative-config '{{..., \"{key}\": {json.dumps(value)}}}'"


def change_of(document: Mapping[str, Any], backends: Sequence[Backend]) -> str:
    """Return the lines that make replicas of the other arm serve like the better one; empty if none.

    They are flags of `vllm serve`, by how replicas of the better arm were seen to speculate.
    """
    ends = better_of(document)
    if ends is None:
        return ""
    if document["depths"]:
        return lines_of(document, ends[0])
    if document.get("policies"):
        return f"policy: {ends[0]}"
    better, other = (document["arms"][name]["replicas"] for name in ends)
    model = next((each for each in backends if each.name in better), None)
    if model is None:
        return ""
    flag = "# without --speculative-config"
    if model.speculative_config or model.num_speculative_tokens:
        config = {"method": model.method.value, "num_speculative_tokens": model.num_speculative_tokens}
        flag = f"--speculative-config '{json.dumps({**config, **(model.speculative_config or {})})}'"
    return f"# start {', '.join(other)} as {model.name}:\n{flag}"


def better_of(document: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the better arm and the other one; None if unknown. With two arms, harm to one is enough."""
    if document["stage"] == "decided" and document["findings"]:
        finding = document["findings"][0]
        return finding["better"], finding["other"]
    harmed = str(document.get("harmed"))
    if document["stage"] == "harm" and harmed in (arms := [*document["arms"]]) and len(arms) == 2:
        return arms[1 - arms.index(harmed)], harmed
    return None


def page(model: str, document: Mapping[str, Any]) -> str:
    """Return the report as self-contained HTML."""
    arms = document["arms"]
    head = "".join(f"<th>{escape(arm)}" for arm in arms)
    rows = "".join(
        f"<tr><td>{name}" + "".join(f"<td>{figure}" for figure in figures) for name, *figures in rows_of(document)
    )
    replicas = "; ".join(f"{arm}: {', '.join(each['replicas'])}" for arm, each in arms.items())
    lasted = f"{document['minutes']:g} minutes on {day_of(document)}, {document['blocks']} blocks of time"
    about = f"{model}, {lasted}: {document['stage']}. {replicas}."
    change = document.get("change")
    return _page().substitute(
        title=f"{escape(' against '.join(arms))}: {escape(model)}",
        sentence=escape(document["sentence"]),
        about=escape(about),
        table=f"<tr><th>{head}{rows}",
        curves="".join(_curve(finding) for finding in document["findings"]),
        cost=escape(cost_of(document)),
        change=f"<h2>What to change</h2><pre>{escape(change)}</pre>" if change else "",
        certain=f"{CERTAIN:.0%}",
        shown=f"{SHOWN:.0%}",
    )


@cache
def _page() -> Template:
    return Template(files(__package__).joinpath("report.html").read_text("utf-8"))


def rows_of(document: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of the known figures, with each arm's values."""
    arms = document["arms"].values()
    known = {figure: [each.get(figure) for each in arms] for figure in _FIGURES}
    return [[_FIGURES[figure], *map(_shown, each)] for figure, each in known.items() if each != [None] * len(each)]


def cost_of(document: Mapping[str, Any]) -> str:
    """Return a sentence on what the comparison cost users."""
    cost = document["cost"]
    if cost is None and (document["policies"] or not document["usual"]):
        return "What comparing costs is not measured: no block of time is as usual."
    if cost is None and document["stage"] == Stage.RUNNING:
        return "It is not known yet what comparing costs: too few blocks of time were as usual."
    if cost is None:
        return "It is not known what comparing cost: too few blocks of time were as usual."
    interval = f"{SHOWN:.0%}: {cost['low'] - 1:+.1%} to {cost['high'] - 1:+.1%}"
    changed = f"While it compared, the time of requests changed by {cost['ratio'] - 1:+.1%} ({interval})"
    return f"{changed}, by {cost['control']} blocks of time as usual."


def day_of(document: Mapping[str, Any]) -> str:
    """Return the day on which it began."""
    return time.strftime("%Y-%m-%d", time.gmtime(document["began_s"]))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _curve(finding: Mapping[str, Any]) -> str:
    """Return the ratio by load with its interval, as a drawing."""
    points = finding["curve"]
    loads = [point["in_flight"] for point in points]
    low = min(0.9, *(max(0.1, point["low"]) for point in points))
    high = max(1.1, *(min(4.0, point["high"]) for point in points))
    span = max(loads[-1] - loads[0], 1e-9)

    def at(load: float, ratio: float) -> str:
        x = _MARGIN + (load - loads[0]) / span * (_WIDTH - 2 * _MARGIN)
        y = _HEIGHT - _MARGIN - (min(max(ratio, low), high) - low) / (high - low) * (_HEIGHT - 2 * _MARGIN)
        return f"{x:.1f},{y:.1f}"

    band = " ".join(
        [at(point["in_flight"], point["high"]) for point in points]
        + [at(point["in_flight"], point["low"]) for point in reversed(points)]
    )
    line = " ".join(at(point["in_flight"], point["ratio"]) for point in points)
    even = " ".join(at(load, 1.0) for load in (loads[0], loads[-1]))
    labels = "".join(
        f"<text x={at(load, low).split(',')[0]} y={_HEIGHT - _MARGIN + 18} text-anchor=middle>{load:.3g}</text>"
        for load in (loads[0], loads[len(loads) // 2], loads[-1])
    )
    scale = "".join(
        f"<text x={_MARGIN - 6} y={at(loads[0], ratio).split(',')[1]} text-anchor=end>{ratio:.2f}</text>"
        for ratio in (low, 1.0, high)
    )
    title = f"Time of {escape(finding['better'])} over that of {escape(finding['other'])}, by load"
    drawn = f"<polygon points='{band}' /><polyline points='{line}' /><polyline class=even points='{even}' />"
    axis = f"<text x={_WIDTH / 2} y={_HEIGHT - 8} text-anchor=middle>requests in flight per replica</text>"
    box = f"viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='{title}'"
    return f"<h2>{title}</h2><svg {box}>{drawn}{labels}{scale}{axis}</svg>"
