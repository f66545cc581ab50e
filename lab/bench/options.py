"""Options of `gateway bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lab.options.shared import ApiKey, IgnoreEos, JsonFile, Timeout, TraceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(TraceOptions):
    """Options of the command line."""

    trace: Annotated[
        tuple[Path, ...],
        typer.Option(metavar="FILE", help="Trace to send, in any format; repeatable.  [default: generated requests]"),
    ] = ()
    limit: Annotated[
        int | None,
        typer.Option(
            "--num-requests", min=1, help="Requests per run.  [default: 100, all of a trace; 6 for each at once]"
        ),
    ] = None
    url: Annotated[tuple[str, ...], typer.Option(metavar="[NAME=]URL", help="Endpoint to measure; repeatable.")] = ()
    config: Annotated[Path | None, typer.Option(help="Pool file whose replicas are measured in turn.")] = None
    model: Annotated[
        str | None,
        typer.Option(help="Model to request.  [default: the request's; the endpoint's first]"),
    ] = None
    only: Annotated[
        tuple[str, ...], typer.Option(metavar="BACKEND", help="Replica of the pool to measure; repeatable.")
    ] = ()
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Target to compare with.  [default: the one that does not speculate]"),
    ] = None
    rate: Annotated[
        str | None, typer.Option(metavar="R[,R...]", help="Requests per second.  [default: as in the trace]")
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Requests under way in a closed loop, instead of a rate."),
    ] = None
    temperature: Annotated[
        str | None,
        typer.Option(metavar="T[,T...]", help="Sampling temperature.  [default: the request's, the engine's]"),
    ] = None
    k: Annotated[
        str | None, typer.Option(metavar="K[,K...]", help="num_speculative_tokens for the pool's replicas.")
    ] = None
    input_tokens: Annotated[str, typer.Option(metavar="N[-M]", help="Length of generated prompts.")] = "512"
    output_tokens: Annotated[str, typer.Option(metavar="N[-M]", help="Length of answers to generated prompts.")] = "128"
    warmup: Annotated[int, typer.Option(min=0, help="First requests of each run to leave out of the figures.")] = 0
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0
    api_key: ApiKey = None
    timeout_s: Timeout = 600.0
    ignore_eos: IgnoreEos = False
    json_file: JsonFile = None
