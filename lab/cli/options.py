"""Options that several commands share."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.completion import calibrations, models


def above_zero(value: float | None) -> float | None:
    """Check that an option is a finite number above 0; typer's `min` accepts NaN."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g}: give a number above 0")
    return value


def writable(path: Path | None) -> Path | None:
    """Check that an output file can be written, before any work is done."""
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"{path}: its folder does not exist")
    if path.is_dir():
        raise typer.BadParameter(f"{path}: is a folder; give a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{path}: no permission to write")
    return path


def refuse_rate_with_speed(rate: float | None, speed: float) -> None:
    """Check that only one of `--rate` and `--speed` is given."""
    if rate is not None and speed != 1.0:
        raise typer.BadParameter("cannot be combined with --speed; give one of the two", param_hint="--rate")


Traces = Annotated[list[Path], typer.Argument(help="Traces in any format: files, or folders of them.")]
TraceFormat = Annotated[str | None, typer.Option("--format", help="Format of the trace.  [default: detected]")]
Strict = Annotated[bool, typer.Option("--strict", help="Reject a trace with a broken line.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of requests to use.")]
Rate = Annotated[
    float | None,
    typer.Option(metavar="R", callback=above_zero, help="Mean requests per second; the trace's pattern is kept."),
]
Speed = Annotated[float, typer.Option(metavar="S", callback=above_zero, help="Speed-up of the trace's arrivals.")]
PoolModel = Annotated[str | None, typer.Option(autocompletion=models, help="Model, for a pool with several.")]
CalibrationOfAll = Annotated[
    str | None,
    typer.Option(
        autocompletion=calibrations, help="Calibration of all replicas' step times.  [default: as in the pool file]"
    ),
]
Slo = Annotated[
    str | None, typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Latency bounds in seconds that define goodput.")
]
JsonFile = Annotated[Path | None, typer.Option(metavar="FILE", callback=writable, help="File to write all figures to.")]
ReportFile = Annotated[
    Path | None, typer.Option(metavar="FILE.html", callback=writable, help="File to write an HTML report to.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key for endpoints given by URL.")]
Timeout = Annotated[float, typer.Option(metavar="S", help="Seconds after which a request counts as failed.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Generate up to the length limit (vLLM).")]
