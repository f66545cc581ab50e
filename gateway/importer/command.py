"""`gateway import`: a pool file made of another router's configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backends.validation import UsageError
from gateway.cli.group import CommandGroup
from gateway.cli.output import say

if TYPE_CHECKING:
    from gateway.importer.configuration import Configuration

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make a pool file of another router's configuration. What could not be kept is listed on stderr.",
)
_ANY_FLAGS = {"ignore_unknown_options": True}

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE | FLAGS...", help="A file, or the flags themselves.", show_default=False),
]
Output = Annotated[Path | None, typer.Option(help="Write the pool file here instead of to stdout.")]
Model = Annotated[str | None, typer.Option(help="The model of replicas whose model is not configured.")]
Service = Annotated[str | None, typer.Option(help="The Kubernetes service of replicas that are found by labels.")]


@app.command()
def litellm(
    file: Annotated[Path, typer.Argument(help="config.yaml of LiteLLM's proxy.")],
    *,
    output: Output = None,
) -> None:
    """Import the config.yaml of LiteLLM's proxy."""
    from gateway.importer import litellm as source
    from gateway.importer.flags import read_mapping

    _write(f"litellm {file.name}", lambda: source.read(read_mapping(file)), output)


@app.command("production-stack", context_settings=_ANY_FLAGS)
def production_stack(
    words: Words = None,
    *,
    output: Output = None,
    model: Model = None,
    service: Service = None,
    release: Annotated[str, typer.Option(help="Release of the Helm chart, in the names of its services.")] = "vllm",
) -> None:
    """Import the values.yaml of vLLM production-stack's Helm chart, or its router's flags."""
    from gateway.importer import production_stack as source

    def read() -> Configuration:
        return source.read(words or [], model, service, release)

    _write("production-stack", read, output)


@app.command("vllm-router", context_settings=_ANY_FLAGS)
def vllm_router(words: Words = None, *, output: Output = None, model: Model = None, service: Service = None) -> None:
    """Import the flags of vllm-router, or a script that starts it."""
    _worker_router("vllm-router", words, output, model, service)


@app.command("sglang-router", context_settings=_ANY_FLAGS)
def sglang_router(words: Words = None, *, output: Output = None, model: Model = None, service: Service = None) -> None:
    """Import the flags of sglang-router, SGLang's model gateway, or a script that starts it."""
    _worker_router("sglang-router", words, output, model, service)


@app.command()
def nginx(
    file: Annotated[Path, typer.Argument(help="Configuration of nginx, or what `nginx -T` prints.")],
    *,
    output: Output = None,
    model: Model = None,
    upstream: Annotated[str | None, typer.Option(help="The upstream of the replicas, if there are several.")] = None,
) -> None:
    """Import an upstream block of nginx, and the settings around its proxy_pass."""
    from gateway.importer import nginx as source
    from gateway.importer.flags import read_text

    _write(f"nginx {file.name}", lambda: source.read(read_text(file), upstream, model), output)


def _worker_router(
    router: str, words: list[str] | None, output: Path | None, model: str | None, service: str | None
) -> None:
    from gateway.importer import worker_router as source

    _write(router, lambda: source.read(router, words or [], model, service), output)


def _write(source: str, read: Callable[[], Configuration], output: Path | None) -> None:
    from gateway.config.pool_text import check_text, pool_text, variables

    if output is not None and output.exists():
        raise UsageError(f"{output} exists already: choose another --output, or remove it")
    configuration = read()
    pool = configuration.pool()
    head = [f"Made by `gateway import {source}`. Lines like this one say what is different or to be checked."]
    if configuration.policy != "learned":
        head.append("`policy: {name: learned}` would send each request to the replica that ends it soonest.")
    text = pool_text(pool, configuration.notes, head)
    check_text(text, configuration.placeholders)
    if output is None:
        say(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
    if names := variables(text):
        say(f"Set these variables before you check or serve it: {', '.join(names)}", err=True)
    if configuration.notes:
        say("Different, not kept, or to be checked:", err=True)
    for path, note in dict.fromkeys(configuration.notes):
        say(f"  {'.'.join(map(str, path)) + ': ' if path else ''}{note}", err=True)
