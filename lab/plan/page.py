"""A plan as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lab.plan.mixes import title
from lab.plan.output import Served, serve_commands
from lab.plan.planning import Planned
from lab.plan.result import JudgedMix, Objective, Plan, Reason
from lab.plan.words import LEFT_OUT, schedules, shown, verdict, why
from lab.report.charts import Bar, Line, bar_chart
from lab.report.colors import series_colors
from lab.report.distributions import METRICS, distribution, line_figure
from lab.report.page import code, figure, figures, legend, listed, page, section, table
from lab.report.scale import Axis

_MOST_DRAWN = 6
_ABOUT_GROUPS = (
    "The largest groups. Tokens per step are those of each kind where all replicas are of it; the parts of the loss of "
    "all requests add up to it."
)


def plan_page(planned: Sequence[Planned], objective: Objective, facts: Sequence[str], served: Served) -> str:
    """Return the page as HTML."""
    body = [part for one in planned for part in _sections(one, objective, several=len(planned) > 1)]
    first = next((one for one in planned if one.plan is not None), None)
    if first is not None:
        commands = serve_commands(first, served)
        body.append(section("To start them", code("\n".join(commands))))
    return page("gateway plan", planned[0].calibration.target, ["gateway plan", *facts], body)


def _sections(planned: Planned, objective: Objective, *, several: bool) -> Iterator[str]:
    plan, on = planned.plan, f" on {planned.machine.title}" if several else ""
    if plan is not None:
        drawn = _drawn(plan)
        colors = series_colors(title(one.mix, plan.kinds) for one in drawn)
        dashes = {name: index for index, name in enumerate(colors)}
        entries = [(name, color, dashes[name]) for name, color in colors.items()]
        yield section(f"What to run{on}", listed([verdict(plan, objective), *why(plan, objective)]))
        yield section(
            f"Mixes{on}",
            legend(entries, title="Colour of each mix"),
            figures(_losses(plan, objective), _by_window(plan, drawn, objective, colors, dashes)),
            _mixes(plan, objective, on),
            listed(schedules(plan, [index for one in plan.judged for index in one.mix]), "k by batch size"),
            note=f"The best of {plan.tried:,} mixes tried of {plan.possible:,}, on windows that the search "
            f"has not seen, which are the units of the 95% intervals. {LEFT_OUT}",
        )
        if plan.reason is not None and plan.reason.groups:
            yield section(f"Traffic{on}", _groups(plan, plan.reason, on), note=_ABOUT_GROUPS)
        yield section(f"Distributions{on}", figures(*_distributions(plan, drawn, colors, dashes)))
    fits = [(kind.title, kind.fit) for kind in planned.kinds if not kind.schedule]
    rows = [
        [name, "yes" if fit.fits else "no", f"{fit.tokens:,}", f"{fit.kv_gib:.1f}", fit.reason] for name, fit in fits
    ]
    marks = ["", "", "", "words"] * len(rows)
    headings = ["replica", "fits", "tokens in the KV cache", "GiB for it", "why"]
    yield section(f"Memory of {planned.machine.title}", table(f"Memory{on}", headings, rows, marks))


def _drawn(plan: Plan) -> list[JudgedMix]:
    """Return the mixes to draw: the plan, those that are something of note, and the best others."""
    others = sorted(plan.judged, key=lambda one: not plan.label(one.mix))
    return others[:_MOST_DRAWN]


def _losses(plan: Plan, objective: Objective) -> str:
    bars = [
        Bar.of(title(one.mix, plan.kinds), "var(--s1)", one.loss, 100) for one in plan.judged if one.loss is not None
    ]
    what = "requests that miss the SLO more" if objective.slo else "more time to finish"
    heading = f"Loss of other mixes against the plan: {what}, %"
    return figure(heading, bar_chart(heading, bars, reference=0.0, form="+.1f")) if bars else ""


def _by_window(
    plan: Plan, drawn: Sequence[JudgedMix], objective: Objective, colors: dict[str, str], dashes: dict[str, int]
) -> str:
    what = "Share of requests that keep the SLO" if objective.slo else "Mean seconds to finish"
    lines = [
        Line(name := title(one.mix, plan.kinds), colors[name], list(enumerate(one.by_window, 1)), dashes[name])
        for one in drawn
        if max(one.by_window) < math.inf
    ]
    ticks = tuple(range(1, len(plan.judged[0].by_window) + 1))
    axes = Axis("window, in order of time", at=ticks), Axis("", from_zero=True)
    return line_figure(f"{what}, by window of the trace", lines, *axes)


def _mixes(plan: Plan, objective: Objective, on: str) -> str:
    rows, marks = [], []
    for one in plan.judged:
        row = [title(one.mix, plan.kinds), plan.label(one.mix) or "tried"]
        row += [f"{value:.4g}" for value in (one.e2e_s, one.ttft_s, one.tpot_s)]
        row += [f"{one.value:.1%}"] if objective.slo else []
        loss, is_plan = one.loss, one.mix == plan.chosen
        rows.append([*row, "" if is_plan else shown(loss), "" if is_plan else f"{one.worse_in:.0%}"])
        marks += [""] * (len(rows[-1]) - 3)
        marks += ["" if loss is None or loss.low <= 0 <= loss.high else "bad" if loss.low > 0 else "good", ""]
    headings = ["mix", "what it is", "E2E, s", "TTFT, s", "TPOT, s", *(["SLO kept"] if objective.slo else [])]
    return table(f"Mixes{on}", [*headings, "loss", "worse in"], rows, marks)


def _groups(plan: Plan, reason: Reason, on: str) -> str:
    kinds = list(reason.groups[0].tokens_per_step)
    rows = [
        [
            group.name,
            f"{group.requests_share:.0%}",
            f"{group.tokens_share:.0%}",
            f"{group.lost:+.1%}",
            *(f"{group.tokens_per_step[index]:.2f}" for index in kinds),
        ]
        for group in reason.groups
    ]
    rival = f"part of the loss of {title(reason.rival, plan.kinds)}"
    headings = ["requests", "share", "of output tokens", rival, *(plan.kinds[index].title for index in kinds)]
    return table(f"Traffic{on}", headings, rows)


def _distributions(
    plan: Plan, drawn: Sequence[JudgedMix], colors: dict[str, str], dashes: dict[str, int]
) -> Iterator[str]:
    for metric, (_, _, factor) in METRICS.items():
        points = {title(one.mix, plan.kinds): one.distributions[metric] for one in drawn}
        rows = [
            [name, *(f"{factor * value:.4g}" for value, share in own if share in (50, 90, 99))]
            for name, own in points.items()
            if own
        ]
        yield distribution(metric, points, colors, dashes, (["mix", "p50", "p90", "p99"], rows))
