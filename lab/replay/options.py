"""Options of `gateway replay`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from backends.validation import UsageError
from lab.options.shared import (
    ApiKey,
    CalibrationOfAll,
    IgnoreEos,
    JsonFile,
    Replications,
    ReportFile,
    Slo,
    Speed,
    Timeout,
    TraceOptions,
    above_zero,
    each_above_zero,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(TraceOptions):
    """Options of the command line."""

    config: Annotated[
        Path | None, typer.Option(help="Pool file with the replicas to simulate and policy settings.")
    ] = None
    live: Annotated[
        tuple[str, ...],
        typer.Option(metavar="[NAME=]URL", help="Endpoint to send the trace to instead; repeatable."),
    ] = ()
    rate: Annotated[
        tuple[float, ...],
        typer.Option(
            metavar="R",
            callback=each_above_zero,
            help="Mean requests per second; the trace's pattern is kept. With --live repeatable: one after the other.",
        ),
    ] = ()
    speed: Speed = 1.0
    for_s: Annotated[
        float | None,
        typer.Option(
            "--for",
            metavar="S",
            callback=above_zero,
            help="Seconds of each --rate of --live, for which requests of the trace come at random times, repeatedly.",
        ),
    ] = None
    concurrency: Annotated[
        tuple[int, ...],
        typer.Option(min=1, metavar="N", help="Requests under way in a closed loop of --live; repeatable."),
    ] = ()
    temperature: Annotated[
        tuple[float, ...],
        typer.Option(min=0, metavar="T", help="Temperature with --live; repeatable.  [default: the request's]"),
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

    def __post_init__(self) -> None:
        """Check that at most one of rate and speed is given."""
        if self.rate and self.speed != 1.0:
            raise UsageError("--rate: cannot be combined with --speed; give one of the two")
