"""`gateway tune` on the command line."""

from __future__ import annotations

import typer

from gateway.cli.extras import require
from lab.options.command import command
from lab.tune.options import Goal, TuneOptions


@command
def tune(options: TuneOptions) -> int:
    """Search for better numbers in the rules by replaying a trace.

    The search plays the first part of the trace; the rest validates the result.

    \b
    gateway tune trace.jsonl.zst --config pool.yaml --out rules.yaml
    gateway tune trace.jsonl.zst --config pool.yaml --out k.yaml --schedule
    """
    if options.schedule:
        rules_alone = (("objective", Goal.MEAN), ("slo", None), ("trials", 100), ("part", 0.6), ("replications", None))
        for name in (name for name, usual in rules_alone if getattr(options, name) != usual):
            raise typer.BadParameter("is for rules; omit it with --schedule", param_hint=f"--{name}")
        require("simulator", "numba")
        from lab.tune.schedule import run_schedule

        return run_schedule(options)
    require("lab", "numba", "optuna")
    from lab.tune.command import run_tune

    return run_tune(options)
