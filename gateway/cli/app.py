"""The command line: `gateway` serves a pool; everything else is a subcommand.

This package registers its subcommands here, those of a room only if the room exists. Other packages, such as `lab`,
register theirs through the entry point group `speculation_gateway.commands`; each entry names a function or a
`typer.Typer`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated

import typer

from backends import background
from gateway import rooms
from gateway.cli.check import check, schema
from gateway.cli.explain import explain
from gateway.cli.extras import is_installed
from gateway.cli.group import CommandGroup
from gateway.cli.init import init
from gateway.cli.operate import drain, reload, resume
from gateway.cli.output import say
from gateway.cli.policy import app as policy
from gateway.cli.serve import serve_pool

_DEFAULT_CONFIG = Path("config/pool.yaml")
_COMMANDS = "speculation_gateway.commands"
_GROUPS = {
    "Serve": ("demo", "init", "check", "schema", "picker"),
    "Operate": ("status", "drain", "resume", "reload", "explain", "policy", "advise", "compare", "canary"),
    "Measure and plan": ("replay", "plan", "tune", "calibrate", "trace"),
}
"""The groups of `gateway --help`, each in order; commands of other packages follow."""


app = typer.Typer(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the installed command `gateway`."""
    try:
        app()
    except OSError as error:  # such as a full disk behind standard output
        background.leave_stdout()
        say(f"gateway: {error}", err=True)
        sys.exit(1)


def _print_version(requested: bool) -> None:
    if requested:
        from gateway import __version__

        say(f"gateway {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    *,
    config: Annotated[Path, typer.Option(help="The pool file.")] = _DEFAULT_CONFIG,
    host: Annotated[str | None, typer.Option(help="Address to listen on; overrides the file.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 picks a free one. Overrides the file.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of worker processes; overrides the file.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve one OpenAI-compatible endpoint for a pool of vLLM replicas that speculate differently."""
    if context.invoked_subcommand is not None:
        context.obj = config
        return
    serve_pool(config, {"host": host, "port": port, "workers": workers})


def _register() -> None:
    """Add all commands, in the order of their groups."""
    commands: dict[str, Callable[..., None] | typer.Typer] = {
        "init": init,
        "check": check,
        "schema": schema,
        "policy": policy,
        "drain": drain,
        "resume": resume,
        "reload": reload,
        "explain": explain,
    }
    for room in iter_modules(rooms.__path__):
        if is_installed(module := f"{rooms.__name__}.{room.name}.command"):
            commands |= import_module(module).COMMANDS
    for entry in entry_points(group=_COMMANDS):
        if is_installed(entry.module):
            commands[entry.name] = entry.load()
    groups = {name: group for group, names in _GROUPS.items() for name in names}
    for name in (*filter(commands.__contains__, groups), *sorted(commands.keys() - groups.keys())):
        command, group = commands[name], groups.get(name, "Others")
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=group)
        else:
            app.command(name, rich_help_panel=group)(command)


_register()
