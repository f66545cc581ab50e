"""A plan on the terminal, and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lab.plan.mixes import title
from lab.plan.output import Served, serve_commands
from lab.plan.planning import Planned
from lab.plan.result import Objective, Plan, Reason
from lab.plan.runner import RunAll, Task
from lab.plan.words import LEFT_OUT, schedules, shown, to_change, verdict, why
from lab.replay.simulate import Replayed


def plan_console() -> Console:
    """Return a console whose tables are not cut where the output is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def show(console: Console, planned: Planned, objective: Objective, replicas: int, served: Served) -> None:
    """Print a plan."""
    plan = planned.plan
    console.print(f"\n{planned.calibration.target} on {planned.machine.title}: {replicas} replicas")
    if plan is None:
        console.print("Nothing fits:")
    else:
        for sentence in (verdict(plan, objective), *why(plan, objective)):
            console.print(sentence, soft_wrap=True)
        console.print(
            f"\nBest of {plan.tried:,} mixes tried (of {plan.possible:,}), routed by {served.policy['name']}:"
        )
        console.print(_mixes(plan, objective))
        console.print(LEFT_OUT, soft_wrap=True)
        if plan.reason is not None and plan.reason.groups:
            console.print("\nBy traffic; tokens per step with all replicas of that kind:")
            console.print(_groups(plan, plan.reason))
        if (changed := to_change(plan)) is not None:
            console.print(changed, soft_wrap=True)
        for line in schedules(plan, [index for one in plan.judged for index in one.mix]):
            console.print(line, soft_wrap=True)
    console.print("\nMemory:")
    for kind in planned.kinds:
        if not kind.schedule:
            console.print(f"  {kind.title}: {kind.fit.reason}", markup=False, soft_wrap=True)
    if plan is not None:
        console.print("\nTo start them:")
        for line in serve_commands(planned, served):
            console.print("  " + line, markup=False, soft_wrap=True)


def with_progress(run_all: RunAll) -> RunAll:
    """Return a function that shows on a terminal that tasks run."""

    def run(tasks: Sequence[Task]) -> Sequence[Sequence[Replayed]]:
        columns = (SpinnerColumn(), TextColumn(f"simulating {len(tasks):,} runs"), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
            progress.add_task("", total=None)
            return run_all(tasks)

    return run


def _mixes(plan: Plan, objective: Objective) -> Table:
    kept = ["SLO kept"] if objective.slo else []
    table = _table(["mix", ""], ["e2e_s", "ttft_s", "tpot_s", *kept, "loss", "worse in"])
    for one in plan.judged:
        row = [title(one.mix, plan.kinds), plan.label(one.mix)]
        row += [f"{value:.4g}" for value in (one.e2e_s, one.ttft_s, one.tpot_s)]
        row += [f"{one.value:.1%}"] if objective.slo else []
        row += ["", ""] if one.mix == plan.chosen else [shown(one.loss), f"{one.worse_in:.0%}"]
        table.add_row(*row)
    return table


def _groups(plan: Plan, reason: Reason) -> Table:
    kinds = list(reason.groups[0].tokens_per_step)
    names = [plan.kinds[index].title for index in kinds]
    table = _table(["requests"], ["share", "of output tokens", "rival loses", *names])
    for group in reason.groups:
        rates = [f"{group.tokens_per_step[index]:.2f}" for index in kinds]
        table.add_row(
            group.name, f"{group.requests_share:.0%}", f"{group.tokens_share:.0%}", f"{group.lost:+.1%}", *rates
        )
    return table


def _table(texts: list[str], numbers: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in texts:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, no_wrap=True, justify="right")
    return table


def document(planned: Planned, objective: Objective) -> dict[str, Any]:
    """Return a plan as JSON."""
    plan, known = planned.plan, planned.kinds
    described: dict[str, Any] = {
        "calibration": planned.calibration.name,
        "machine": planned.machine.title,
        "objective": "slo" if objective.slo else "e2e_s",
        "kinds": [
            {"kind": kind.title, "method": kind.method, "k": kind.k, "config": kind.config, "fit": kind.fit}
            for kind in known
        ],
    }
    if plan is None:
        return described
    described |= {
        "chosen": title(plan.chosen, known),
        "verdict": verdict(plan, objective),
        "why": why(plan, objective),
        "intervals": LEFT_OUT,
        "tried": plan.tried,
        "possible": plan.possible,
        "mixes": [
            {
                "mix": title(one.mix, known),
                "is": plan.label(one.mix),
                "e2e_s": one.e2e_s,
                "ttft_s": one.ttft_s,
                "tpot_s": one.tpot_s,
                "value": one.value,
                "loss": one.loss,
                "worse_in": one.worse_in,
            }
            for one in plan.judged
        ],
    }
    if (changed := to_change(plan)) is not None:
        described["to_change"] = changed
    if plan.reason is not None:
        described["traffic"] = {
            "rival": title(plan.reason.rival, known),
            "groups": [
                {
                    "name": group.name,
                    "requests_share": group.requests_share,
                    "tokens_share": group.tokens_share,
                    "rival_loses": group.lost,
                    "tokens_per_step": {known[kind].title: rate for kind, rate in group.tokens_per_step.items()},
                }
                for group in plan.reason.groups
            ],
            "other_shares": plan.reason.shifts,
            "turns": plan.reason.turns,
        }
    return described
