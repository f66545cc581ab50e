"""`gateway tune` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.extras import require
from lab.cli.options import (
    CalibrationOfAll,
    JsonFile,
    Limit,
    PoolModel,
    Rate,
    Slo,
    Speed,
    Strict,
    TraceFormat,
    Traces,
    refuse_rate_with_speed,
    writable,
)


def tune(
    trace: Traces,
    *,
    config: Annotated[Path, typer.Option(help="Pool file: the replicas, simulated, and the present rules.")],
    out: Annotated[Path, typer.Option(metavar="FILE.yaml", callback=writable, help="Write the rules here.")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="FILE.yaml|{...}", help="Rules to begin with.  [default: the pool's; the default rules]"),
    ] = None,
    objective: Annotated[str, typer.Option(metavar="mean|p99|goodput", help="Of the time to finish.")] = "mean",
    slo: Slo = None,
    trials: Annotated[int, typer.Option(min=1, help="Settings to try.")] = 100,
    part: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the trace to tune on, its first.")] = 0.6,
    model: PoolModel = None,
    rate: Rate = None,
    speed: Speed = 1.0,
    limit: Limit = None,
    budget: Annotated[
        int, typer.Option(min=1, help="Requests to play at most, roughly, before the rest judges.")
    ] = 6_000_000,
    seed: Annotated[int, typer.Option(help="Of the search, and of what is drawn.")] = 0,
    calibration: CalibrationOfAll = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
) -> None:
    """Search the numbers in the rules on the first part of a trace by replay, and judge them on the rest."""
    require("tune", "lab", "numba", "optuna")
    from lab.replay.command import ReplayOptions
    from lab.tune.command import TuneOptions, run_tune

    refuse_rate_with_speed(rate, speed)
    replayed = ReplayOptions(
        trace=tuple(trace),
        config=config,
        model=model,
        rate=rate,
        speed=speed,
        limit=limit,
        seed=seed,
        slo=slo,
        calibration=calibration,
        trace_format=trace_format,
        strict=strict,
        json_file=json,
    )
    raise typer.Exit(run_tune(TuneOptions(replayed, out, policy, objective, trials, part, budget)))
