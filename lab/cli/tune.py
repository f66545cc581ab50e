"""`gateway tune` on the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.extras import require
from gateway.cli.policy import DEFAULT_URL, Admin, AdminKey, Url
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
    refuse_rate_with_speed,
    writable,
)


def tune(
    trace: Annotated[
        list[Path] | None, typer.Argument(help="Traces in any format: files, or folders of them.", show_default=False)
    ] = None,
    *,
    config: Annotated[Path, typer.Option(help="Pool file with the replicas to simulate and the present rules.")],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE.yaml", callback=writable, help="File to write to: rules, or the pool file with --schedule."
        ),
    ],
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
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Instead of rules, find k by batch size for each replica.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="With --schedule: from a running gateway instead of a trace.")
    ] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
) -> None:
    """Search for better numbers in the rules by replaying the first part of a trace, and validate them on the rest.

    With --schedule, find how many tokens each replica should draft at each batch size, and what that gains.
    """
    require("lab", "numba", "optuna")
    from lab.replay.command import ReplayOptions
    from lab.tune.command import TuneOptions, run_tune

    refuse_rate_with_speed(rate, speed)
    if live and not schedule:
        raise typer.BadParameter("only --schedule takes live figures", param_hint="--live")
    if live == bool(trace):
        raise typer.BadParameter("give a trace, or --schedule --live", param_hint="TRACE")
    replayed = ReplayOptions(
        trace=tuple(trace or ()),
        config=config,
        model=model,
        rate=1.0 if schedule else rate,  # the loads of --schedule are its own
        speed=speed,
        limit=limit,
        seed=seed,
        slo=slo,
        calibration=calibration,
        trace_format=trace_format,
        strict=strict,
        json_file=json,
    )
    if schedule:
        from lab.schedule.command import ScheduleOptions, run_schedule

        running = Admin(url, admin_key, None)
        pool = partial(running.get, "/admin/pool") if live else None
        raise typer.Exit(run_schedule(ScheduleOptions(replayed, out, policy, part, pool)))
    raise typer.Exit(run_tune(TuneOptions(replayed, out, policy, objective, trials, part, budget)))
