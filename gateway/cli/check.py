"""`gateway check`: checks a pool file without serving it."""

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
    """Check a pool file and print its pool, without serving it. Exits 2 if there are errors."""
    path: Path = config or context.obj
    settings = read_pool(path)

    from rich.console import Console

    from gateway.recorder import recorder_issue
    from gateway.service.banner import pool_table
    from gateway.state.location import describe

    if settings.recorder is not None and (issue := recorder_issue(settings.recorder)):
        raise UsageError(f"{path}: {issue}")
    Console().print(pool_table(settings))
    typer.echo(describe(settings.state))


def read_pool(path: Path) -> PoolSettings:
    """Return the settings of a pool file, with the default location of its state filled in.

    Raises
    ------
    ConfigError
        If the file cannot be read or contains errors.
    """
    from gateway.config.load import load_pool
    from gateway.state.location import with_state_file

    return with_state_file(load_pool(path), path)
