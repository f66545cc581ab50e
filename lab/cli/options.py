"""Options that several commands take, each defined once."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer


def above_zero(value: float | None) -> float | None:
    """Refuse what is no number above 0, as `min` would not (it takes NaN).

    Raises
    ------
    typer.BadParameter
        If it is none.
    """
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g}: give a number above 0")
    return value


def writable(path: Path | None) -> Path | None:
    """Refuse a file that could not be written in the end, before anything is done.

    Raises
    ------
    typer.BadParameter
        If its folder is not there, it is a folder, or its permissions are against it.
    """
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"{path}: its folder does not exist")
    if path.is_dir():
        raise typer.BadParameter(f"{path}: is a folder; give a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{path}: may not be written")
    return path


def refuse_rate_with_speed(rate: float | None, speed: float) -> None:
    """Let a trace's pace be set in one way alone.

    Raises
    ------
    typer.BadParameter
        If it is set in both.
    """
    if rate is not None and speed != 1.0:
        raise typer.BadParameter("takes the place of --speed; give one of the two", param_hint="--rate")


Traces = Annotated[list[Path], typer.Argument(help="Requests: traces in any format, files or folders of them.")]
TraceFormat = Annotated[str | None, typer.Option("--format", help="The trace's, where it cannot be told.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a trace with a broken line.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Requests of the trace to use at most.")]
Rate = Annotated[
    float | None,
    typer.Option(metavar="R", callback=above_zero, help="Requests per second on average; the trace's pattern is kept."),
]
Speed = Annotated[float, typer.Option(metavar="S", callback=above_zero, help="Times as fast as in the trace.")]
PoolModel = Annotated[str | None, typer.Option(help="Of a pool of several.")]
CalibrationOfAll = Annotated[
    str | None, typer.Option(help="Step times of all replicas.  [default: each one's own in the pool]")
]
Slo = Annotated[
    str | None, typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Bounds in seconds that goodput counts by.")
]
JsonFile = Annotated[Path | None, typer.Option(metavar="FILE", callback=writable, help="Write all figures here.")]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For endpoints given by their address.")]
Timeout = Annotated[float, typer.Option(metavar="S", help="A request that takes longer failed.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Let answers run to their limit (vLLM).")]
