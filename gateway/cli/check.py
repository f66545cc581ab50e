"""`gateway check` and `gateway schema`: validate a pool file without serving it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backends.validation import UsageError
from gateway.cli.output import AsJson, say, say_json

if TYPE_CHECKING:
    from gateway.config.load import Problem
    from gateway.config.settings import PoolSettings


def check(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="The pool file.  [default: config/pool.yaml]")] = None,
    *,
    engines: Annotated[
        bool, typer.Option(help="Ask the engines that run whether they are what the file says, for at most 10 s.")
    ] = True,
    probe: Annotated[
        bool, typer.Option("--probe", help="Ask them for all of it, with a request for four tokens to each.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Check a pool file and print its pool, without serving it. Exits 2 if there are errors.

    An engine that differs from the file is a warning. --probe prints a line per engine, also warns of each that does
    not answer, and exits 1 after any warning. --json prints errors and warnings with their lines.

    \b
    gateway check
    gateway check --probe --config own.yaml
    """
    path: Path = config or context.obj
    try:
        lines, warnings = _checked(path, engines=engines, probe=probe)
    except UsageError as error:
        if json:
            errors = getattr(error, "problems", [{"message": str(error)}])
            say_json({"file": str(path), "errors": errors, "warnings": []})
        raise
    if json:
        say_json({"file": str(path), "errors": [], "warnings": warnings})
    else:
        say("\n".join(lines))
    for problem in warnings:
        say(f"warning: {path}:{problem}", err=True)
    if probe and warnings:
        raise typer.Exit(1)


def _checked(path: Path, *, engines: bool, probe: bool) -> tuple[list[str], list[Problem]]:
    """Return the lines to print for a valid pool file, and how its engines differ from it."""
    settings = read_pool(path)

    from gateway.gateway import rooms
    from gateway.service.banner import limit_lines, pool_lines
    from gateway.service.replicas import configured
    from gateway.service.stores import describe

    for room in rooms():
        if problem := room.problem(settings):
            raise UsageError(f"{path}: {problem}")
    check_certificates(settings)
    lines = [*pool_lines(settings), describe(settings.state)]
    warnings: list[Problem] = []
    backends = configured(settings)
    running = [each for each in backends if not each.launched]
    if (engines or probe) and running:
        from gateway.cli.engines import ask, differences, table
        from gateway.config.load import located

        asked = ask(running, fully=probe)
        compared = sum(each.result.engine is not None for each in asked)
        lines += table(asked) if probe else [f"Compared with the metrics of {compared} of {len(asked)} engines."]
        aliases = {name: model.aliases for name, model in settings.models.items()}
        if issues := list(differences(asked, aliases, fully=probe)):
            warnings = located(path, issues)
    return [*lines, *limit_lines(backends)], warnings


def check_certificates(settings: PoolSettings) -> None:
    """Raise `UsageError` if the certificate of an address cannot be used."""
    from gateway.gateway import rooms
    from gateway.listening.certificate import Certificate

    beside = [found for room in rooms() if (found := room.beside(settings)) is not None]
    for section, tls in (("server", settings.server.tls), *((each.name, each.tls) for each in beside)):
        if tls is not None:
            Certificate(tls, f"{section}.tls")


def schema() -> None:
    """Print the JSON schema of a pool file."""
    from gateway.config.schema import schema_text

    say(schema_text(), nl=False)


def read_pool(path: Path) -> PoolSettings:
    """Return the settings of a pool file, with the defaults from its path and the environment filled in."""
    from gateway.config.defaults import with_admin_key, with_state_file
    from gateway.config.load import load_pool

    return with_state_file(with_admin_key(load_pool(path)), path)
