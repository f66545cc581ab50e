"""`gateway check` and `gateway schema`: whether a pool file is right, without serving it."""

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
    *,
    engines: Annotated[
        bool, typer.Option(help="Ask the engines that run whether they are what the file says, for at most 10 s.")
    ] = True,
) -> None:
    """Check a pool file and print its pool, without serving it. Exits 2 if there are errors.

    What an engine does otherwise than the file says is a warning, which changes no exit status.
    """
    path: Path = config or context.obj
    settings = read_pool(path)

    from gateway.rooms import rooms
    from gateway.service.banner import limit_lines, pool_lines
    from gateway.service.replicas import configured
    from gateway.service.stores import describe

    for room in rooms():
        if problem := room.problem(settings):
            raise UsageError(f"{path}: {problem}")
    typer.echo("\n".join(pool_lines(settings)))
    typer.echo(describe(settings.state))
    backends, warnings = configured(settings), list[str]()
    if engines and (running := [each for each in backends if not each.launched]):
        from gateway.cli.engines import compare

        summary, warnings = compare(running)
        typer.echo(summary)
    for line in limit_lines(backends):
        typer.echo(line)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def schema() -> None:
    """Print the JSON schema of a pool file."""
    from gateway.config.schema import schema_text

    typer.echo(schema_text(), nl=False)


def read_pool(path: Path) -> PoolSettings:
    """Return the settings of a pool file, with the default location of its state filled in."""
    from gateway.config.load import load_pool
    from gateway.config.state_file import with_state_file

    return with_state_file(load_pool(path), path)
