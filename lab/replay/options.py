"""Options of `gateway replay`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lab.options.shared import (
    ApiKey,
    CalibrationOfAll,
    IgnoreEos,
    JsonFile,
    PacedOptions,
    Replications,
    ReportFile,
    Slo,
    Timeout,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(PacedOptions):
    """Options of the command line."""

    config: Annotated[
        Path | None, typer.Option(help="Pool file with the replicas to simulate and policy settings.")
    ] = None
    live: Annotated[
        tuple[str, ...],
        typer.Option(metavar="[NAME=]URL", help="Endpoint to send the trace to instead; repeatable."),
    ] = ()
    policies: Annotated[
        tuple[str, ...],
        typer.Option(
            "--policy",
            metavar="NAME|FILE.yaml|{...}",
            help="Policy to replay; repeatable. `oracle` knows lengths and acceptance.  [default: the pool's]",
        ),
    ] = ()
    model: Annotated[
        str | None,
        typer.Option(
            help="Model, for a pool with several; with --live, model to request.  [default: the request's; the first]",
        ),
    ] = None
    warmup: Annotated[int, typer.Option(min=0, help="Number of first requests to leave out of the figures.")] = 0
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed; a simulated replay is reproducible.  [default: 0; texts of --live vary]"),
    ] = None
    replications: Replications = None
    slo: Slo = None
    calibration: CalibrationOfAll = None
    api_key: ApiKey = None
    timeout_s: Timeout = 600.0
    ignore_eos: IgnoreEos = False
    json_file: JsonFile = None
    report: ReportFile = None
