"""An evaluation as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lab.evaluate.bootstrap import block_length, block_sums, interval
from lab.evaluate.estimators import MIN_EFFECTIVE_SAMPLE_SIZE, Evaluation, effective_size, weights_of
from lab.evaluate.log import NUMBERS, Log
from lab.replay.parts import Part, by_length, by_load, by_temperature, distinguishing
from lab.report.charts import Area, area_chart
from lab.report.colors import backend_colors, series_colors
from lab.report.differences import EXPLAINED, difference_chart, mark, shown
from lab.report.distributions import METRICS, distribution, ecdf, every
from lab.report.page import figure, figures, legend, listed, page, section, table
from lab.report.scale import Axis, number
from lab.statistics import Floats, Interval

_LOGGED = "as logged"
_ESTIMATORS = {"ips": "IPS", "snips": "SNIPS", "dr": "DR"}
_INTERVALS = 40
_CAVEAT = (
    "For traffic like the logged one. Each request is considered by itself: that requests slow each other differently "
    "under another policy is not included; a replay includes it."
)


def evaluation_page(
    evaluations: Sequence[Evaluation],
    log: Log,
    trace: Sequence[str],
    left_out: Mapping[str, int],
    methods: Mapping[str, str],
) -> str:
    """Return the page as HTML.

    Parameters
    ----------
    trace
        Names of the files.
    left_out
        Number of requests that were not used, by reason.
    methods
        Method by backend, of those where it is known.
    """
    names = ", ".join(trace)
    facts = [f"gateway evaluate {names}: {log.requests:,} requests"]
    facts += [f"left out: {count:,} {why}" for why, count in left_out.items()]
    usable = [one for one in evaluations if not one.refusal]
    colors = series_colors([_LOGGED, *(one.policy for one in evaluations)])
    dashes = {name: index for index, name in enumerate(colors)}
    body = [
        legend(((name, color, dashes[name]) for name, color in colors.items()), sticky=True),
        _against_the_log(usable, colors),
        section(
            "Distributions",
            figures(*_distributions(usable, log, colors, dashes)),
            note="Weighted as each policy would choose, as far as enough requests are beyond.",
        ),
        _choices(evaluations, log, methods),
        _parts(usable, log),
        _means(usable),
        section("Notes", listed(_notes(evaluations))),
    ]
    return page(f"gateway evaluate {names}", "What other policies would have done", facts, body)


def _against_the_log(usable: Sequence[Evaluation], colors: Mapping[str, str]) -> str:
    if not usable:
        return ""
    found = {metric: {one.policy: _best(one, metric) for one in usable} for metric in METRICS}
    rows = [
        [one.policy, f"{one.effective_sample_size:,.0f}", *(shown(found[metric][one.policy]) for metric in METRICS)]
        for one in usable
    ]
    marks = [css for one in usable for css in ("", *(mark(found[metric][one.policy]) for metric in METRICS))]
    headings = ["difference in %, policy", "effective sample size", *(title for title, _, _ in METRICS.values())]
    return section(
        "Against the log",
        figures(*(difference_chart(METRICS[metric][0], by_policy, colors) for metric, by_policy in found.items())),
        table("Differences from the log, %", headings, rows, marks),
        note="Mean times against those of the log, doubly robust where there is a model of the outcomes, else "
        "self-normalised; less is faster. 95% intervals from resampling blocks of consecutive requests. "
        f"{_CAVEAT} {EXPLAINED}",
    )


def _best(one: Evaluation, metric: str) -> Interval | None:
    if metric not in one.metrics:
        return None
    estimates = one.metrics[metric].estimates
    return estimates.get("dr", estimates["snips"]).to_log


def _distributions(
    usable: Sequence[Evaluation], log: Log, colors: Mapping[str, str], dashes: Mapping[str, int]
) -> Iterator[str]:
    for metric, (_, _, factor) in METRICS.items():
        known = [(one.policy, one.metrics[metric]) for one in usable if metric in one.metrics]
        outcome = log.outcomes[metric]
        points = {_LOGGED: ecdf(outcome[outcome > 0]), **{policy: found.distribution for policy, found in known}}
        rows = [
            [policy, *(_spread(found.quantiles.get(share), factor) for share in (0.5, 0.9, 0.99))]
            for policy, found in known
        ]
        yield distribution(metric, points, colors, dashes, (["policy", "p50", "p90", "p99"], rows))


def _choices(evaluations: Sequence[Evaluation], log: Log, methods: Mapping[str, str]) -> str:
    """Return the share of each backend over the log, as logged and as each policy would choose."""
    colors = backend_colors({name: methods.get(name) for name in log.backends})
    edges = np.linspace(0, log.requests, min(_INTERVALS, log.requests) + 1).astype(int)
    logged = np.eye(len(log.backends))[log.chosen]
    drawn = []
    for name, chosen in {_LOGGED: logged, **{one.policy: log.propensities[one.policy] for one in evaluations}}.items():
        shares = np.add.reduceat(chosen, edges[:-1], axis=0) / np.diff(edges)[:, None]
        areas = [Area(one, colors[one], shares[:, index].tolist()) for index, one in enumerate(log.backends)]
        begins = edges[:-1].tolist()
        rows = [[number(at), *(f"{share:.0%}" for share in row)] for at, row in zip(begins, shares, strict=True)]
        axis = Axis("requests, in order of arrival", span=(0.0, float(log.requests)))
        title = f"Choices, {name}" if name == _LOGGED else f"Choices of {name}"
        chart = area_chart(title, areas, edges.tolist(), axis)
        drawn.append(figure(title, chart, data=table(title, ["from request", *log.backends], every(rows))))
    key = legend(((name, color, None) for name, color in colors.items()), title="Colour of each backend")
    return section("Choices over the log", key, figures(*drawn))


def _parts(usable: Sequence[Evaluation], log: Log) -> str:
    outcome = log.outcomes["e2e_s"]
    known = outcome > 0
    weights = {one.policy: weights_of(log, one.policy) for one in usable}
    rows, marks, lost = [], [], []
    for part in _log_parts(log):
        inside = part.inside & known
        found = [_part_ratio(outcome[inside], weights[one.policy][inside]) for one in usable]
        title = f"{part.by}: {part.name}"
        rows.append([title, f"{int(inside.sum()):,}", *map(shown, found)])
        marks += ["", *map(mark, found)]
        lost += [
            f"{one.policy}, {part.by} {part.name}: {shown(ratio)} %"
            for one, ratio in zip(usable, found, strict=True)
            if ratio is not None and ratio.low > 1
        ]
    if not rows or not usable:
        return ""
    return section(
        "Where it gains and loses against the log",
        table("Time to finish by part, difference in %", ["difference in %", "requests", *weights], rows, marks),
        listed(lost or ["none beyond its interval"], "Slower parts"),
        note="Mean time to finish against the same requests as logged, self-normalised, with 95% intervals; one in "
        f"twenty is expected to miss. Parts with an effective sample size below {MIN_EFFECTIVE_SAMPLE_SIZE} have none.",
    )


def _log_parts(log: Log) -> list[Part]:
    columns = {name: log.numbers[:, NUMBERS.index(name)] for name in ("prompt_tokens", "temperature")}
    return distinguishing(
        [
            by_temperature(columns["temperature"]),
            by_length("prompt tokens", columns["prompt_tokens"]),
            by_load("in flight at the backend", log.in_flight[np.arange(log.requests), log.chosen]),
        ]
    )


def _part_ratio(outcome: Floats, weights: Floats) -> Interval | None:
    if effective_size(weights) < MIN_EFFECTIVE_SAMPLE_SIZE:
        return None
    length = block_length(len(outcome))
    up, size, ones, logged = (
        block_sums(one, length) for one in (weights * outcome, weights, np.ones(len(outcome)), outcome)
    )
    try:
        return interval([up, ones], [size, logged])
    except ValueError:  # too few blocks
        return None


def _means(usable: Sequence[Evaluation]) -> str:
    rows = []
    for one in usable:
        for metric, found in one.metrics.items():
            means = [found.estimates.get(name) for name in _ESTIMATORS]
            cells = [_spread(None if mean is None else mean.mean) for mean in means]
            rows.append([f"{one.policy}, {METRICS[metric][0].lower()}", f"{found.logged:.4g}", *cells])
    headings = ["mean, s", "logged", *_ESTIMATORS.values()]
    return section("All figures", table("Estimated means, seconds", headings, rows)) if rows else ""


def _notes(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    for one in evaluations:
        if one.refusal:
            yield f"{one.policy} cannot be evaluated on this log: {one.refusal}."
        yield from (f"{one.policy}: {note}." for note in one.notes)


def _spread(one: Interval | None, factor: float = 1.0) -> str:
    if one is None:
        return "-"
    value, low, high = (factor * end for end in (one.value, one.low, one.high))
    return f"{value:.4g} ({low:.4g} to {high:.4g})"
