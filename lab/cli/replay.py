"""`gateway replay` on the command line."""

from __future__ import annotations

import typer

from gateway.cli.extras import require
from lab.options.command import command
from lab.replay.options import ReplayOptions


@command
def replay(options: ReplayOptions) -> int:
    """Replay a trace with each policy, or at endpoints, and compare.

    Policies run on simulated replicas; running endpoints get the trace's requests.

    \b
    gateway replay trace.jsonl.zst --config pool.yaml --policy least_loaded --policy learned --report replay.html
    gateway replay trace.jsonl.zst --live http://127.0.0.1:8080 --rate 2 --rate 8 --for 300
    """
    require("lab", "numba", "duckdb")
    if not options.live:
        live = {"--for": options.for_s, "--concurrency": options.concurrency, "--temperature": options.temperature}
        for name in (name for name, given in {**live, "--ignore-eos": options.ignore_eos}.items() if given):
            raise typer.BadParameter("requires --live", param_hint=name)
        from lab.replay.command import run_replay

        return run_replay(options)
    simulated = {"--config": options.config, "--calibration": options.calibration, "--policy": options.policies}
    for name, given in simulated.items():
        if given:
            raise typer.BadParameter("is for simulated replicas; omit it with --live", param_hint=name)
    from lab.live.command import run_live

    return run_live(options)
