"""`gateway tune` on the command line."""

from __future__ import annotations

import typer

from gateway.cli.extras import require
from lab.options.command import command
from lab.tune.options import TuneOptions


@command
def tune(options: TuneOptions) -> int:
    """Search for better numbers in the rules by replaying the first part of a trace, and validate them on the rest.

    With --schedule, find how many tokens each replica should draft at each batch size, and what that gains.
    """
    require("lab", "numba", "optuna")
    if options.live and not options.schedule:
        raise typer.BadParameter("only --schedule takes live figures", param_hint="--live")
    if options.live == bool(options.trace):
        raise typer.BadParameter("give a trace, or --schedule --live", param_hint="TRACE")
    if options.schedule:
        from lab.schedule.command import run_schedule

        return run_schedule(options)
    from lab.tune.command import run_tune

    return run_tune(options)
