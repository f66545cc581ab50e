"""`gateway evaluate` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.completion import policies
from gateway.cli.extras import require
from lab.cli.options import JsonFile, Limit, ReportFile, Strict, TraceFormat, Traces


def evaluate(
    trace: Traces,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE.yaml|{...}",
            autocompletion=policies,
            help="Policy to evaluate; repeatable.  [default: the pool's]",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Pool file with k and weight of each replica, and policy settings.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model whose requests are used.  [default: that of the first request]")
    ] = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(help="Seed of resampling and of randomized policies.")] = 0,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Learned state written by `gateway replay --state`.")
    ] = None,
    json: JsonFile = None,
    report: ReportFile = None,
) -> None:
    """Estimate from recorded requests how other policies would have done. Exits 1 if that is possible for none."""
    require("lab", "sklearn", "threadpoolctl")
    from lab.evaluate.command import run_evaluate

    raise typer.Exit(
        run_evaluate(
            trace=tuple(trace),
            policy=tuple(policy or ()),
            config=config,
            model=model,
            trace_format=trace_format,
            strict=strict,
            limit=limit,
            seed=seed,
            json_file=json,
            report=report,
            state=state,
        )
    )
