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
    config: Annotated[Path, typer.Option(help="Pool file with the replicas to simulate and the present rules.")],
    out: Annotated[Path, typer.Option(metavar="FILE.yaml", callback=writable, help="File to write the rules to.")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="FILE.yaml|{...}", help="Rules to start from.  [default: the pool's; the default rules]"),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="mean|p99|goodput", help="What to optimize: mean or p99 of the time to finish, or goodput."
        ),
    ] = "mean",
    slo: Slo = None,
    trials: Annotated[int, typer.Option(min=1, help="Number of settings to try.")] = 100,
    part: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the trace to tune on, from its start.")] = 0.6,
    model: PoolModel = None,
    rate: Rate = None,
    speed: Speed = 1.0,
    limit: Limit = None,
    budget: Annotated[
        int, typer.Option(min=1, help="Approximate number of requests to simulate before the final comparison.")
    ] = 6_000_000,
    seed: Annotated[int, typer.Option(help="Seed of the search and the simulation.")] = 0,
    calibration: CalibrationOfAll = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
) -> None:
    """Search for better numbers in the rules by replaying the first part of a trace, and validate them on the rest."""
    require("lab", "numba", "optuna")
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
