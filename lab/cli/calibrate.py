"""`gateway calibrate` on the command line."""

from __future__ import annotations

from gateway.cli.extras import require
from lab.calibrate.options import CalibrateOptions
from lab.options.command import command


@command
def calibrate(options: CalibrateOptions) -> int:
    """Make a calibration of your machine, and print its error.

    Fits closed loops of `gateway replay --live --concurrency`.

    \b
    gateway calibrate loops.json --out mine.yaml --hardware "2x RTX-4090"
    """
    require("lab", "numba")
    from lab.calibrate.command import run_calibrate

    return run_calibrate(options)
