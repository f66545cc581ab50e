"""A plan on the terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from lab.plan.memory import machine_of
from lab.plan.mixes import title
from lab.plan.output import serve_commands
from lab.plan.planning import Planned
from lab.plan.result import Objective, Plan
from lab.plan.words import LEFT_OUT, schedules, shown, to_change, verdict
from lab.report.terminal import table_console, text_table


def show(planned: Planned, objective: Objective, sampled: str) -> None:
    """Print a plan."""
    plan = planned.plan
    known = planned.calibration
    scaled = f": {known.step.source}; how far that is off: docs/plan.md" if "@" in known.name else ""
    print(f"{sampled}\n\n{known.target} on {machine_of(known)}{scaled}")
    if plan is None:
        print("Nothing fits:")
    else:
        print(verdict(plan, objective))
        print(f"\nBest of {plan.tried:,} mixes tried, routed by {planned.policy['name']}:")
        table_console().print(_mixes(plan, objective))
        print(LEFT_OUT)
        if (changed := to_change(plan)) is not None:
            print(changed)
        for line in schedules(plan):
            print(line)
    print("\nMemory:")
    for kind in planned.kinds:
        if not kind.schedule:
            print(f"  {kind.title}: {kind.fit.reason}")
    if plan is not None:
        print("\nTo start them:")
        for line in serve_commands(planned):
            print("  " + line)


def _mixes(plan: Plan, objective: Objective) -> Table:
    kept = ["SLO kept"] if objective.slo else []
    table = text_table(["mix", "", "e2e_s", "ttft_s", "tpot_s", *kept, "loss", "worse in"], left=2)
    for one in plan.judged:
        row = [title(one.mix, plan.kinds), plan.label(one.mix)]
        row += [f"{value:.4g}" for value in (one.e2e_s, one.ttft_s, one.tpot_s)]
        row += [f"{one.value:.1%}"] if objective.slo else []
        row += ["", ""] if one.mix == plan.chosen else [shown(one.loss), f"{one.worse_in:.0%}"]
        table.add_row(*row)
    return table


def document(planned: Planned, objective: Objective) -> dict[str, Any]:
    """Return a plan as JSON."""
    plan, known = planned.plan, planned.kinds
    described: dict[str, Any] = {
        "calibration": planned.calibration.name,
        "machine": machine_of(planned.calibration),
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
        "verdict": verdict(plan, objective),
        "to_change": to_change(plan),
        "intervals": LEFT_OUT,
        "tried": plan.tried,
        "mixes": [asdict(one) | {"mix": title(one.mix, known), "is": plan.label(one.mix)} for one in plan.judged],
    }
