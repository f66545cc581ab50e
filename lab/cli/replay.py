"""`gateway replay` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.completion import models, policies
from gateway.cli.extras import require
from lab.cli.options import (
    ApiKey,
    CalibrationOfAll,
    IgnoreEos,
    JsonFile,
    Limit,
    Rate,
    ReportFile,
    Slo,
    Speed,
    Strict,
    TraceFormat,
    Traces,
    above_zero,
    refuse_rate_with_speed,
    writable,
)


def replay(
    trace: Traces,
    *,
    config: Annotated[
        Path | None, typer.Option(help="Pool file with the replicas to simulate and policy settings.")
    ] = None,
    live: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]URL", help="Endpoint to send the trace to instead; repeatable."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE.yaml|{...}",
            autocompletion=policies,
            help="Policy to replay; repeatable. `oracle` knows lengths and acceptance.  [default: the pool's]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            autocompletion=models,
            help="Model, for a pool with several; with --live, model to request.  [default: the request's; the first]",
        ),
    ] = None,
    rate: Rate = None,
    speed: Speed = 1.0,
    limit: Limit = None,
    copies: Annotated[
        int, typer.Option(min=1, help="How often each session with think times is played, with prefixes of its own.")
    ] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Number of first requests to leave out of the figures.")] = 0,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed; a simulated replay is reproducible.  [default: 0; texts of --live vary]"),
    ] = None,
    slo: Slo = None,
    regret: Annotated[
        bool, typer.Option("--regret", help="Also replay `oracle`, and show each policy's mean time relative to it.")
    ] = False,
    calibration: CalibrationOfAll = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=writable, help="Learned state: read if the file exists, written at the end."
        ),
    ] = None,
    api_key: ApiKey = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="S", callback=above_zero, help="With --live: seconds after which a request counts as failed."
        ),
    ] = 600.0,
    ignore_eos: IgnoreEos = False,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
    report: ReportFile = None,
    replications: Annotated[
        int,
        typer.Option(
            min=0,
            help="Replays of other traffic like the trace, for the intervals of --report; 0: no intervals.",
        ),
    ] = 6,
) -> None:
    """Replay a trace on simulated replicas with each policy, or send it to running endpoints, and compare."""
    require("lab", "numba", "duckdb")
    refuse_rate_with_speed(rate, speed)
    if live:
        for option, given in (
            ("--config", config),
            ("--calibration", calibration),
            ("--state", state),
            ("--regret", regret),
            ("--copies", copies > 1),
        ):
            if given not in {None, False}:
                raise typer.BadParameter("is for simulated replicas; omit it with --live", param_hint=option)
        from lab.live.command import run_live
        from lab.live.session import LiveOptions

        raise typer.Exit(
            run_live(
                LiveOptions(
                    trace=tuple(trace),
                    urls=tuple(live),
                    policies=tuple(policy or ()),
                    model=model,
                    rate=rate,
                    speed=speed,
                    limit=limit,
                    warmup=warmup,
                    seed=seed,
                    slo=slo,
                    api_key=api_key,
                    timeout_s=timeout,
                    ignore_eos=ignore_eos,
                    trace_format=trace_format,
                    strict=strict,
                    json_file=json,
                    report=report,
                )
            )
        )
    if config is None:
        raise typer.BadParameter("give a pool to simulate, or --live URL", param_hint="--config")
    if ignore_eos:
        raise typer.BadParameter("requires --live", param_hint="--ignore-eos")
    from lab.replay.command import ReplayOptions, run_replay

    raise typer.Exit(
        run_replay(
            ReplayOptions(
                trace=tuple(trace),
                config=config,
                policies=tuple(policy or ()),
                model=model,
                rate=rate,
                speed=speed,
                limit=limit,
                copies=copies,
                warmup=warmup,
                seed=seed or 0,
                slo=slo,
                regret=regret,
                calibration=calibration,
                state=state,
                trace_format=trace_format,
                strict=strict,
                json_file=json,
                report=report,
                replications=replications,
            )
        )
    )
