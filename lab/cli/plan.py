"""`gateway plan` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.extras import require
from lab.cli.options import JsonFile, Limit, Rate, Speed, Strict, TraceFormat, Traces, refuse_rate_with_speed, writable


def plan(
    trace: Traces,
    *,
    replicas: Annotated[int, typer.Option(min=1, help="How many replicas there are to be.")],
    gpu: Annotated[
        list[str] | None, typer.Option(help="GPU to plan for, as h200; again.  [default: the calibration's]")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Pool file: the present mix and its policy.")] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Target and step times, as llama-3.1-8b-h100.  [default: the pool's]")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.yaml|{...}", help="That routes.  [default: the pool's; thresholds]")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD[=K,K...]", help="Method to try, with its k; again.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Seek the most requests within these seconds.")
    ] = None,
    rate: Rate = None,
    speed: Speed = 1.0,
    limit: Limit = 16_000,
    budget: Annotated[int, typer.Option(min=1, help="Mixes to try, about.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the last comparison.")] = 2,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [default: one a core]")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster to run on; `local` starts one.")
    ] = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable, help="Write the plan here, as a pool file.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Of simulated replicas, to try it.")] = False,
) -> None:
    """Find the mix of replicas that serves a trace best, and whether it fits. Exits 1 if nothing does."""
    require("plan", "lab", "numba")
    from lab.plan.command import PlanOptions, run_plan

    refuse_rate_with_speed(rate, speed)
    raise typer.Exit(
        run_plan(
            PlanOptions(
                trace=tuple(trace),
                replicas=replicas,
                gpus=tuple(gpu or ()),
                config=config,
                calibration=calibration,
                policy=policy,
                methods=tuple(method or ()),
                slo=slo,
                rate=rate,
                speed=speed,
                limit=limit,
                budget=budget,
                seeds=seeds,
                jobs=jobs,
                ray=ray,
                trace_format=trace_format,
                strict=strict,
                json_file=json,
                out=out,
                simulate=simulate,
            )
        )
    )
