"""The command line: `gateway` serves a pool; `check` and `schema` look at one, `bench` measures one, `trace` traces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.bench import bench
from gateway.cli.policy import app as policy_app
from gateway.cli.trace_tools import evaluate, plan, replay, tune
from lab.trace.command import app as trace_app

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings

_DEFAULT_CONFIG = Path("config/pool.yaml")
_WRONG_FILE = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(trace_app, name="trace")
app.add_typer(policy_app, name="policy")


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
    settings = _load(config)
    given = {"host": host, "port": port, "workers": workers}
    chosen = {name: value for name, value in given.items() if value is not None}
    server = settings.server.model_copy(update=chosen)

    from gateway.service.run import serve as run

    raise typer.Exit(run(settings.model_copy(update={"server": server}), config))


@app.command()
def check(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="The pool file.  [default: config/pool.yaml]")] = None,
) -> None:
    """Check a pool file as at start, and print its pool, serving nothing. Exits 2 if anything is wrong."""
    settings = _load(config or context.obj)

    from rich.console import Console

    from gateway.recorder import recorder_fault
    from gateway.service.banner import pool_table
    from gateway.state.place import describe

    if settings.recorder is not None and (fault := recorder_fault(settings.recorder)):
        typer.echo(f"{config or context.obj}: {fault}", err=True)
        raise typer.Exit(_WRONG_FILE)
    Console().print(pool_table(settings))
    typer.echo(describe(settings.state))


@app.command()
def schema() -> None:
    """Print the JSON schema of a pool file."""
    from gateway.config.schema import schema_text

    typer.echo(schema_text(), nl=False)


for command in (bench, evaluate, replay, tune, plan):
    app.command()(command)


def _load(path: Path) -> PoolSettings:
    from gateway.config.load import ConfigError, load_pool
    from gateway.state.place import with_place

    try:
        return with_place(load_pool(path), path)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        sys.exit(_WRONG_FILE)
