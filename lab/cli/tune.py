"""`gateway tune` on the command line."""

from __future__ import annotations

from gateway.cli.extras import require
from lab.options.command import command
from lab.tune.options import TuneOptions


@command
def tune(options: TuneOptions) -> int:
    """Search for better numbers in the rules by replaying a trace.

    The search plays its first part; what it finds is validated on the rest.

    \b
    gateway tune trace.jsonl.zst --config pool.yaml --out rules.yaml
    gateway tune trace.jsonl.zst --config pool.yaml --out k.yaml --schedule
    """
    if options.schedule:
        require("simulator", "numba")
        from lab.tune.schedule import run_schedule

        return run_schedule(options)
    require("lab", "numba", "optuna")
    from lab.tune.command import run_tune

    return run_tune(options)
