"""`gateway plan` on the command line."""

from __future__ import annotations

from gateway.cli.extras import require
from lab.options.command import command
from lab.plan.options import PlanOptions


@command
def plan(options: PlanOptions) -> int:
    """Find the mix of replicas that serves a trace best and fits.

    Exits 1 if none fits into memory.

    \b
    gateway plan trace.jsonl.zst --replicas 4 --calibration llama-3.1-8b-h100 --out pool.yaml
    gateway plan trace.jsonl.zst --replicas 4 --config pool.yaml --json plan.json
    """
    require("lab", "numba")
    from lab.plan.command import run_plan

    return run_plan(options)
