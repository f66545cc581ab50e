"""Options that several commands share, and reading the trace they name."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from backends.validation import UsageError

if TYPE_CHECKING:
    from lab.trace.lines import Report
    from lab.trace.record import TraceRecord


_BOUNDS = ("ttft", "tpot", "e2e")


def above_zero(value: float | None) -> float | None:
    """Check that an option is a finite number above 0; typer's `min` accepts NaN."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g}: give a number above 0")
    return value


def finite(value: float | None) -> float | None:
    """Check that an option is a finite number."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value:g}: give a number")
    return value


def each_above_zero(values: list[float] | None) -> list[float] | None:
    """Check that each value of a repeated option is a finite number above 0."""
    for value in values or ():
        above_zero(value)
    return values


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


def slo_bounds(text: str | None) -> dict[str, float]:
    """Return the bounds of `--slo` in seconds, keyed by `ttft`, `tpot` and `e2e`; empty without the option.

    Examples
    --------
    >>> slo_bounds("ttft=0.5, e2e=10")
    {'ttft': 0.5, 'e2e': 10.0}
    """
    bounds: dict[str, float] = {}
    for item in text.split(",") if text is not None else ():
        name, _, value = (part.strip() for part in item.partition("="))
        try:
            bound_s = float(value)
        except ValueError:
            raise UsageError(f"--slo {text}: write it as ttft=0.5,tpot=0.02,e2e=10, in seconds") from None
        if name not in _BOUNDS:
            raise UsageError(f"--slo {text}: unknown bound {name!r}; the bounds are {', '.join(_BOUNDS)}")
        if name in bounds:
            raise UsageError(f"--slo {text}: {name} is given twice")
        if not 0 < bound_s < math.inf:
            raise UsageError(f"--slo {text}: {name} must be a number of seconds above 0")
        bounds[name] = bound_s
    return bounds


PoolModel = Annotated[str | None, typer.Option(help="Model, for a pool with several.")]
CalibrationOfAll = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.yaml[@GPU]", help="Calibration of all replicas' step times.  [default: as in the pool file]"
    ),
]
Replications = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Replays of like traffic for the 95% intervals, each as long as the first. "
        " [default: 6 if they take seconds, else 0]",
    ),
]
Slo = Annotated[
    str | None, typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Latency bounds in seconds that define goodput.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", callback=writable, help="File to write all figures to.")
]
ReportFile = Annotated[
    Path | None, typer.Option(metavar="FILE.html", callback=writable, help="File to write an HTML report to.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key for endpoints given by URL.")]
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="S", callback=above_zero, help="Seconds after which a request counts as failed."),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Generate up to the length limit (vLLM).")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a trace is read."""

    trace_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="gateway|azure|burstgpt|mooncake|aiperf|bailian|weka|sharegpt|litellm|openai_batch|messages|vllm",
            help="Format of the trace.  [default: detected]",
        ),
    ] = None
    time_unit: Annotated[
        Literal["s", "ms"] | None,
        typer.Option(metavar="s|ms", help="Unit of the times, where the format leaves it open."),
    ] = None
    block_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of a block of hash_ids, where that is left open.")
    ] = None
    strict: Annotated[bool, typer.Option("--strict", help="Reject a trace with a broken line.")] = False

    def read(
        self, paths: Path | Sequence[Path], report: Report | None = None, *, in_order: bool = False
    ) -> Iterator[TraceRecord]:
        """Yield all records as `lab.trace.read.read_trace` does; print broken lines on standard error."""
        from lab.trace.formats.format import Units
        from lab.trace.lines import BrokenLines
        from lab.trace.read import read_trace

        return read_trace(
            paths,
            format=self.trace_format,
            strict=self.strict,
            in_order=in_order,
            report=report or BrokenLines(lambda text: print(text, file=sys.stderr)),
            units=Units(self.time_unit, self.block_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions(ReadOptions):
    """A command's trace, and how much of it to use."""

    trace: Annotated[tuple[Path, ...], typer.Argument(help="Traces in any format: files, or folders of them.")]
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests to use.")] = None

    def records(self, *, in_order: bool = False) -> Iterator[TraceRecord]:
        """Yield all records."""
        return self.read(self.trace, in_order=in_order)


Speed = Annotated[float, typer.Option(metavar="S", callback=above_zero, help="Speed-up of the trace's arrivals.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedOptions(TraceOptions):
    """The trace that a command plays, and how fast."""

    rate: Annotated[
        float | None,
        typer.Option(metavar="R", callback=above_zero, help="Mean requests per second; the trace's pattern is kept."),
    ] = None
    speed: Speed = 1.0

    def __post_init__(self) -> None:
        """Check that at most one of rate and speed is given."""
        if self.rate is not None and self.speed != 1.0:
            raise UsageError("--rate: cannot be combined with --speed; give one of the two")
