"""The command line: `gateway` serves a pool; what else it does is in subcommands, one file for each.

Those of this package are registered here. Others come from installed packages, through the entry point group
`speculation_gateway.commands`: each names a function or a `typer.Typer`. The laboratory's are registered so.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.check import check, read_pool
from gateway.cli.group import CommandGroup
from gateway.cli.policy import app as policy
from gateway.cli.schema import schema

_DEFAULT_CONFIG = Path("config/pool.yaml")
_COMMANDS = "speculation_gateway.commands"


app = typer.Typer(cls=CommandGroup, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """Run the command line: what the installed command `gateway` calls."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from gateway import __version__

        typer.echo(f"gateway {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    *,
    config: Annotated[Path, typer.Option(help="The pool file.")] = _DEFAULT_CONFIG,
    host: Annotated[str | None, typer.Option(help="Address to listen at, instead of the file's.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that serve.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve one OpenAI-compatible endpoint in front of a pool of unlike vLLM replicas."""
    if context.invoked_subcommand is not None:
        context.obj = config
        return
    settings = read_pool(config)
    given = {"host": host, "port": port, "workers": workers}
    chosen = {name: value for name, value in given.items() if value is not None}
    server = settings.server.model_copy(update=chosen)

    from gateway.service.run import serve as run

    raise typer.Exit(run(settings.model_copy(update={"server": server}), config))


def _register(name: str, command: Callable[..., None] | typer.Typer) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


_register("check", check)
_register("schema", schema)
_register("policy", policy)
for _found in sorted(entry_points(group=_COMMANDS), key=lambda each: each.name):
    _register(_found.name, _found.load())
