"""`gateway tune` on the command line."""

from __future__ import annotations

from gateway.cli.extras import require
from lab.options.command import command
from lab.tune.options import TuneOptions


@command
def tune(options: TuneOptions) -> int:
    """Search for better numbers in the rules by replaying the first part of a trace, and validate them on the rest."""
    require("lab", "numba", "optuna")
    from lab.tune.command import run_tune

    return run_tune(options)
