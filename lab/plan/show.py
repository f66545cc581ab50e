"""A plan on the terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from lab.past.check import PastReplay
from lab.plan.memory import machine_of
from lab.plan.mixes import title
from lab.plan.output import serve_commands
from lab.plan.planning import Planned
from lab.plan.result import Plan, PlanObjective
from lab.plan.words import LEFT_OUT, shown, to_change, verdict
from lab.report.terminal import report, text_table


def show(planned: Planned, objective: PlanObjective, sampled: str, past: PastReplay | None) -> None:
    """Show a plan, after the replay of the past."""
    plan = planned.plan
    known = planned.calibration
    parts: list[str | Table] = [said(planned, objective, past), ""]
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


def said(planned: Planned, objective: PlanObjective, past: PastReplay | None) -> str:
    """Return what was found, with the error of the replay of the past and what is assumed of the methods."""
    if planned.plan is None:
        return "Nothing fits."
    found = verdict(planned.plan, objective)
    premises = planned.calibration.premises(kind.method for kind in planned.kinds)
    return " ".join([found if past is None else past.beside(found), *premises])


def not_tried(planned: Planned) -> str | None:
    """Return the methods that were not tried, and why."""
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


def document(planned: Planned, objective: PlanObjective, past: PastReplay | None) -> dict[str, Any]:
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
        "verdict": said(planned, objective, past),
        "to_change": to_change(plan),
        "not_tried": planned.left_out,
        "intervals": LEFT_OUT,
        "tried": plan.tried,
        "mixes": [asdict(one) | {"mix": title(one.mix, known), "is": plan.label(one.mix)} for one in plan.judged],
    }
