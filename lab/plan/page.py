"""A plan as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lab.plan.mixes import title
from lab.plan.planning import Planned
from lab.plan.search import Objective, Plan
from lab.report.charts import Bar, Line, bar_chart
from lab.report.colors import series_colors
from lab.report.distributions import METRICS, distribution, line_figure
from lab.report.page import code, figure, figures, legend, listed, page, section, table
from lab.report.scale import Axis


def plan_page(planned: Sequence[Planned], objective: Objective, facts: Sequence[str], commands: Sequence[str]) -> str:
    """Return the page as HTML.

    Parameters
    ----------
    facts
        What was planned on, for the head of the page.
    commands
        Lines that start the first plan's replicas; empty if nothing fits.
    """
    body = [part for one in planned for part in _sections(one, objective, several=len(planned) > 1)]
    if commands:
        body.append(section("To start them", code("\n".join(commands))))
    return page("gateway plan", planned[0].calibration.target, ["gateway plan", *facts], body)


def _sections(planned: Planned, objective: Objective, *, several: bool) -> Iterator[str]:
    plan, on = planned.plan, f" on {planned.machine.title}" if several else ""
    if plan is not None:
        names = {one.mix: title(one.mix, plan.kinds) for one in plan.judged}
        colors = series_colors(names.values())
        dashes = {name: index for index, name in enumerate(colors)}
        entries = [(name, color, dashes[name]) for name, color in colors.items()]
        yield section(
            f"Mixes{on}",
            legend(entries, title="Colour of each mix"),
            figures(_gains(plan, objective, colors), _by_part(plan, objective, colors, dashes)),
            _mixes(plan, objective, on),
            note=f"The best of {plan.tried:,} mixes tried of {plan.possible:,}, on parts of the trace that the search "
            "has not seen. The 95% intervals come from resampling blocks of its requests, after averaging over the "
            "seeds of the simulation.",
        )
        yield section(f"Distributions{on}", figures(*_distributions(plan, colors, dashes)))
        yield section(f"Where the plan loses{on}", listed(_losses(plan)))
    fits = [(kind.title, kind.fit) for kind in planned.kinds]
    rows = [
        [name, "yes" if fit.fits else "no", f"{fit.tokens:,}", f"{fit.kv_gib:.1f}", fit.reason] for name, fit in fits
    ]
    marks = ["", "", "", "words"] * len(rows)
    headings = ["replica", "fits", "tokens in the KV cache", "GiB for it", "why"]
    yield section(f"Memory of {planned.machine.title}", table(f"Memory{on}", headings, rows, marks))


def _gains(plan: Plan, objective: Objective, colors: dict[str, str]) -> str:
    bars = []
    for one in plan.judged:
        if (gain := one.gain) is not None:
            name = title(one.mix, plan.kinds)
            bars.append(Bar(name, colors[name], 100 * gain.value, 100 * gain.low, 100 * gain.high))
    what = "more requests that keep the SLO" if objective.slo else "time saved"
    heading = f"The plan's gain over other mixes: {what}, %"
    return figure(heading, bar_chart(heading, bars, reference=0.0, form="+.1f")) if bars else ""


def _by_part(plan: Plan, objective: Objective, colors: dict[str, str], dashes: dict[str, int]) -> str:
    what = "Share of requests that keep the SLO" if objective.slo else "Mean seconds to finish"
    lines = [
        Line(name := title(one.mix, plan.kinds), colors[name], list(enumerate(one.by_part, 1)), dashes[name])
        for one in plan.judged
        if max(one.by_part) < math.inf
    ]
    ticks = tuple(range(1, len(plan.judged[0].by_part) + 1))
    axes = Axis("part, in order of time", at=ticks), Axis("", from_zero=True)
    return line_figure(f"{what}, by part of the trace", lines, *axes)


def _mixes(plan: Plan, objective: Objective, on: str) -> str:
    rows, marks = [], []
    for one in plan.judged:
        row = [title(one.mix, plan.kinds), plan.label(one.mix) or "runner-up"]
        row += [f"{value:.4g}" for value in (one.e2e_s, one.ttft_s, one.tpot_s)]
        row += [f"{one.value:.1%}"] if objective.slo else []
        gain = one.gain
        shown = "" if one.mix == plan.chosen else "unknown"
        shown = shown if gain is None else f"{100 * gain.value:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
        rows.append([*row, shown, "" if one.mix == plan.chosen else f"{one.better_in:.0%}"])
        marks += [""] * (len(rows[-1]) - 3)
        marks += ["" if gain is None or gain.low <= 0 <= gain.high else "good" if gain.low > 0 else "bad", ""]
    headings = ["mix", "what it is", "E2E, s", "TTFT, s", "TPOT, s", *(["SLO kept"] if objective.slo else [])]
    return table(f"Mixes{on}", [*headings, "plan's gain, %", "better in"], rows, marks)


def _distributions(plan: Plan, colors: dict[str, str], dashes: dict[str, int]) -> Iterator[str]:
    for metric, (_, _, factor) in METRICS.items():
        points = {title(one.mix, plan.kinds): one.distributions[metric] for one in plan.judged}
        rows = [
            [name, *(f"{factor * value:.4g}" for value, share in own if share in (50, 90, 99))]
            for name, own in points.items()
            if own
        ]
        yield distribution(metric, points, colors, dashes, (["mix", "p50", "p90", "p99"], rows))


def _losses(plan: Plan) -> list[str]:
    """Return the mixes that the plan does not beat everywhere."""
    lines = [
        f"{title(one.mix, plan.kinds)} is as good or better in {1 - one.better_in:.0%} of the parts and seeds"
        for one in plan.judged
        if one.mix != plan.chosen and one.better_in < 1
    ]
    return lines or ["It is better than each of these mixes in every part and with every seed."]
