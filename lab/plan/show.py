"""A plan in sentences, on the terminal, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from lab.past.check import PastReplay
from lab.plan.compared import LiveFinding
from lab.plan.memory import machine_of
from lab.plan.mixes import title
from lab.plan.output import serve_commands
from lab.plan.planning import Planned
from lab.plan.result import Plan, PlanObjective
from lab.report.terminal import report, text_table
from lab.statistics import Interval

LEFT_OUT = (
    "Intervals say what other traffic like this would give in the simulator. They leave out its own error: on "
    "measurements that nothing was fitted to, its tokens per second are off by 7.4% in the median (41% at most), and "
    "the load at which speculation stops paying by a factor of 1.14 (docs/simulator.md)."
)


def verdict(plan: Plan, objective: PlanObjective) -> str:
    """Return whether one kind of replica is best, what the best mix of the other sort would lose, and the SLO kept.

    A difference counts only if its interval excludes 0.
    """
    kept = plan.result(plan.chosen).value
    said = f" It keeps the SLO of {kept:.1%} of the requests." if objective.slo else ""
    return _against_the_other_sort(plan, objective) + said


def _against_the_other_sort(plan: Plan, objective: PlanObjective) -> str:
    name = title(plan.chosen, plan.kinds)
    is_alike = len(set(plan.chosen)) == 1
    rival = plan.mixed if is_alike else plan.alike
    for one in plan.judged:  # best first
        if one.loss is not None and one.loss.high < 0 and len(one.mix) == len(plan.chosen):
            better = f"{title(one.mix, plan.kinds)} is better, with a loss of {shown(one.loss)}"
            return (
                f"Run {name}. Yet on windows that the search has not seen, {better}: play more of the trace (--limit)."
            )
    if rival is None:
        return f"Run {name}. No mix of several methods was tried."
    other = title(rival, plan.kinds)
    what = "The best of several methods" if is_alike else "The best with all replicas alike"
    loss = plan.result(rival).loss
    start = f"Run {name}: " + ("all replicas alike is best." if is_alike else "a mixed pool is best.")
    if loss is None:
        return f"{start} {what}, {other}, cannot be compared: it does not serve all requests, or they are too few."
    if loss.low > 0:
        return f"{start} {what}, {other}, {_loses(loss, objective)}."
    start = f"Run {name}: no mix of methods is shown to be better than all replicas alike."
    return f"{start} {what}, {other}, differs by {shown(loss)}, which may be chance."


def to_change(plan: Plan) -> str | None:
    """Return what to change about the running replicas; None if none are known."""
    if plan.present is None:
        return None
    now, planned = Counter(plan.present), Counter(plan.chosen)
    stopped, started = (tuple(each.elements()) for each in (now - planned, planned - now))
    if not stopped and not started:
        return "To change: nothing; this mix runs now."
    return f"To change: {' -> '.join(title(each, plan.kinds) or 'nothing' for each in (stopped, started))}."


def _loses(loss: Interval, objective: PlanObjective) -> str:
    interval = f"{loss.value:.1%} ({loss.low:.1%} to {loss.high:.1%})"
    return f"keeps the SLO of {interval} fewer requests" if objective.slo else f"takes {interval} longer"


def shown(loss: Interval | None) -> str:
    """Return a loss with its interval; `unknown` for None."""
    if loss is None:
        return "unknown"
    return f"{loss.value:+.1%} " + (f"({loss.low:+.1%} to {loss.high:+.1%})" if loss.is_known else "(no interval)")


def show(planned: Planned, objective: PlanObjective, sampled: str, past: PastReplay | None, head: str) -> None:
    """Show a plan below its verdict, after the replay of the past."""
    plan = planned.plan
    known = planned.calibration
    parts: list[str | Table] = [head, ""]
    parts += [sampled, "", f"{known.target} on {machine_of(known)}"]
    if plan is not None:
        parts.append(f"Best of {plan.tried:,} mixes tried, routed by {planned.policy['name']}:")
        parts += [_mixes(plan, objective), LEFT_OUT, *filter(None, [not_tried(planned), to_change(plan)])]
    parts += ["", "Memory:", *(f"  {kind.title}: {kind.fit.reason}" for kind in planned.kinds if not kind.schedule)]
    if plan is not None:
        if planned.max_model_len:
            parts.append(f"--max-model-len {planned.max_model_len}: a longer context does not fit beside the weights.")
        parts += ["", "To start them:", *(f"  {line}" for line in serve_commands(planned))]
    report("gateway plan", parts, before=past.parts() if past is not None else ())


def said(planned: Planned, objective: PlanObjective, past: PastReplay | None, live: Sequence[LiveFinding]) -> str:
    """Return the finding, the error of the replay of the past, and what is known and assumed about the methods."""
    if planned.plan is None:
        return "Nothing fits."
    found = verdict(planned.plan, objective)
    premises = planned.calibration.premises(kind.method for kind in planned.kinds)
    compared = filter(None, [one.beside(planned.plan) for one in live])
    return " ".join([found if past is None else past.beside(found), *compared, *premises])


def not_tried(planned: Planned) -> str | None:
    """Return the methods not tried, and why."""
    names = ", ".join(planned.left_out)
    return names and f"Not tried: {names}. No acceptance and draft are published for {planned.calibration.target}."


def _mixes(plan: Plan, objective: PlanObjective) -> Table:
    kept = ["SLO kept"] if objective.slo else []
    table = text_table(["mix", "", "e2e_s", "ttft_s", "tpot_s", *kept, "loss", "worse in"], left=2)
    for one in plan.judged:
        row = [title(one.mix, plan.kinds), plan.label(one.mix)]
        row += [f"{value:.4g}" for value in (one.e2e_s, one.ttft_s, one.tpot_s)]
        row += [f"{one.value:.1%}"] if objective.slo else []
        row += ["", ""] if one.mix == plan.chosen else [shown(one.loss), f"{one.worse_in:.0%}"]
        table.add_row(*row)
    return table


def document(planned: Planned, objective: PlanObjective, past: PastReplay | None, head: str) -> dict[str, Any]:
    """Return a plan as JSON."""
    plan, known = planned.plan, planned.kinds
    described: dict[str, Any] = {
        "calibration": planned.calibration.name,
        "machine": machine_of(planned.calibration),
        "past": past and past.document(),
        "objective": "slo" if objective.slo else "e2e_s",
        "kinds": [
            {"kind": kind.title, "method": kind.method, "k": kind.k, "config": kind.config, "fit": kind.fit}
            for kind in known
        ],
    }
    if plan is None:
        return described
    return described | {
        "chosen": title(plan.chosen, known),
        "verdict": head,
        "to_change": to_change(plan),
        "not_tried": planned.left_out,
        "intervals": LEFT_OUT,
        "tried": plan.tried,
        "mixes": [asdict(one) | {"mix": title(one.mix, known), "is": plan.label(one.mix)} for one in plan.judged],
    }
