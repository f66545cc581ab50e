"""`gateway check`: a pool file, checked as at start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backends.validation import UsageError

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings


def check(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="The pool file.  [default: config/pool.yaml]")] = None,
) -> None:
    """Check a pool file as at start, and print its pool, serving nothing. Exits 2 if anything is wrong."""
    path: Path = config or context.obj
    settings = read_pool(path)

    from rich.console import Console

    from gateway.recorder import recorder_issue
    from gateway.service.banner import pool_table
    from gateway.state.location import describe

    if settings.recorder is not None and (fault := recorder_issue(settings.recorder)):
        raise UsageError(f"{path}: {fault}")
    Console().print(pool_table(settings))
    typer.echo(describe(settings.state))


def read_pool(path: Path) -> PoolSettings:
    """Read a pool file, with the place of its state filled in.

    Raises
    ------
    ConfigError
        If anything in it is wrong.
    """
    from gateway.config.load import load_pool
    from gateway.state.location import with_place

    return with_place(load_pool(path), path)
