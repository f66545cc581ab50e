"""`gateway evaluate` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.extras import require
from lab.cli.options import JsonFile, Limit, Strict, TraceFormat, Traces


def evaluate(
    trace: Traces,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE.yaml|{...}", help="Policy to evaluate; again.  [default: the pool's own]"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Pool file: k and weight of each replica, and the policies' settings.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Whose requests.  [default: the first's]")] = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(help="Of resampling, and of policies that draw.")] = 0,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What policies know: written by `gateway replay --state`.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Tell from recorded requests what other policies would have given. Exits 1 if the record cannot tell of any."""
    require("evaluate", "lab", "sklearn", "threadpoolctl")
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
            state=state,
        )
    )
