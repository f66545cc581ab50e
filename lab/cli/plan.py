"""`gateway plan` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.completion import calibrations, policies
from gateway.cli.extras import require
from lab.cli.options import (
    JsonFile,
    Rate,
    ReportFile,
    Speed,
    Strict,
    TraceFormat,
    Traces,
    refuse_rate_with_speed,
    writable,
)


def plan(
    trace: Traces,
    *,
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas to plan.")],
    gpu: Annotated[
        list[str] | None, typer.Option(help="GPU to plan for, such as h200; repeatable.  [default: the calibration's]")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Pool file with the present mix and policy.")] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            autocompletion=calibrations,
            help="Target model and step times, such as llama-3.1-8b-h100.  [default: the pool's]",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.yaml|{...}",
            autocompletion=policies,
            help="Routing policy.  [default: the pool's; learned]",
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD[=K,K...]", help="Method to try, with its k; repeatable.")
    ] = None,
    schedules: Annotated[bool, typer.Option(help="Also try k by batch size.")] = True,
    slo: Annotated[
        str | None,
        typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Maximize the requests that keep these bounds, in seconds."),
    ] = None,
    rate: Rate = None,
    speed: Speed = 1.0,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Requests to play, in windows spread evenly over the trace.  [default: about 9,500]"),
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Approximate number of mixes to try.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds in the final comparison.")] = 2,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [default: one per core]")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address of a Ray cluster to run on; `local` starts one.")
    ] = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
    report: ReportFile = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable, help="Pool file to write the plan to.")
    ] = None,
    helm_values: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable, help="Values of the Helm chart to write the plan to."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Write a pool of simulated replicas, to try it out.")
    ] = False,
) -> None:
    """Find the mix of replicas that serves a trace best and fits into memory, and say why. Exits 1 if none fits."""
    require("lab", "numba")
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
                schedules=schedules,
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
                report=report,
                out=out,
                simulate=simulate,
                helm_values=helm_values,
            )
        )
    )
