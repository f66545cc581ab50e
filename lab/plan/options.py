"""Options of `gateway plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lab.options.shared import JsonFile, PacedOptions, PoolModel, writable


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(PacedOptions):
    """Options of the command line."""

    replicas: Annotated[int, typer.Option(min=1, max=1000, help="Number of replicas to plan.")]
    config: Annotated[Path | None, typer.Option(help="Pool file with the present mix and policy.")] = None
    model: PoolModel = None
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.yaml[@GPU]",
            help="Target model and GPU to plan for, such as llama-3.1-8b-h100.  [default: the pool's]",
        ),
    ] = None
    compared: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="`gateway compare status --json`: what live traffic has found."),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.yaml|{...}",
            help="Routing policy.  [default: the pool's; learned]",
        ),
    ] = None
    methods: Annotated[
        tuple[str, ...],
        typer.Option("--method", metavar="METHOD[=K,K...]", help="Method to try, with its k; repeatable."),
    ] = ()
    slo: Annotated[
        str | None,
        typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Maximize the requests that keep these bounds, in seconds."),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(min=14, help="Requests to play, in windows spread evenly over the trace.  [default: about 9,500]"),
    ] = None
    budget: Annotated[int, typer.Option(min=1, help="Approximate number of mixes to try.")] = 200
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [default: one per core]")] = None
    json_file: JsonFile = None
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable, help="Pool file to write the plan to.")
    ] = None
    helm_values: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable, help="Values of the Helm chart to write the plan to."),
    ] = None
