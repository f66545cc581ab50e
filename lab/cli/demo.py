"""`gateway demo` on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from backends.validation import UsageError
from gateway.cli.extras import require


def demo(
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 takes a free one.", min=0, max=65535)] = 0,
    rate: Annotated[float, typer.Option(help="Requests per second.", min=0.1)] = 14.0,
    phase_s: Annotated[float, typer.Option(help="Seconds until the load changes.", min=1)] = 60.0,
    phases: Annotated[int | None, typer.Option(help="Number of phases; without it, until Ctrl-C.", min=1)] = None,
) -> None:
    """Show the gateway at work without a GPU: see it learn.

    A gateway with five simulated replicas serves chat that turns into code edits and back; its page shows it live.
    Ctrl-C ends everything and leaves nothing behind.

    \b
    gateway demo
    """
    require("lab", "numba", "duckdb")
    from lab.demo.run import run_demo

    try:
        run_demo(port, rate, phase_s, phases)
    except RuntimeError as error:
        raise UsageError(str(error)) from error
