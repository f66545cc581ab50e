"""`gateway import`: a pool file made of another router's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backends.validation import UsageError
from gateway.cli.group import CommandGroup

if TYPE_CHECKING:
    from gateway.importer.configuration import Configuration

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Make a pool file of another router's configuration. What could not be kept is listed on stderr.",
)

Output = Annotated[Path | None, typer.Option(help="Write the pool file here instead of to stdout.")]


@app.command()
def litellm(
    file: Annotated[Path, typer.Argument(help="config.yaml of LiteLLM's proxy.")],
    *,
    output: Output = None,
) -> None:
    """Import the config.yaml of LiteLLM's proxy."""
    from gateway.importer import litellm as source
    from gateway.importer.document import read_mapping

    _check_output(output)
    _write(f"litellm {file.name}", source.read(read_mapping(file)), output)


@app.command("production-stack")
def production_stack(
    file: Annotated[Path, typer.Argument(help="values.yaml of the chart.")],
    *,
    output: Output = None,
    release: Annotated[str, typer.Option(help="Release of the Helm chart, in the names of its services.")] = "vllm",
) -> None:
    """Import the values.yaml of vLLM production-stack's Helm chart."""
    from gateway.importer import production_stack as source
    from gateway.importer.document import read_mapping

    _check_output(output)
    _write(f"production-stack {file.name}", source.read(read_mapping(file), release), output)


def _check_output(output: Path | None) -> None:
    if output is not None and output.exists():
        raise UsageError(f"{output} exists already: choose another --output, or remove it")


def _write(source: str, configuration: Configuration, output: Path | None) -> None:
    from gateway.importer.pool_text import check_text, pool_text, variables

    pool = configuration.pool()
    notes = list(dict.fromkeys(configuration.notes))
    head = [f"Made by `gateway import {source}`. These lines say what is different or to be checked."]
    if configuration.policy != "learned":
        head.append("`policy: {name: learned}` would send each request to the replica that ends it soonest.")
    text = pool_text(pool, [*head, *notes])
    check_text(text, configuration.placeholders)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
    if names := variables(text):
        typer.echo(f"Set these variables before you check or serve it: {', '.join(names)}", err=True)
    if notes:
        typer.echo("Different, not kept, or to be checked:", err=True)
    for note in notes:
        typer.echo(f"  {note}", err=True)
