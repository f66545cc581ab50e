"""`gateway init`: writes a pool file to begin from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from backends.validation import UsageError

_FOR_EDITORS = "# yaml-language-server: $schema=pool.schema.json\n#\n"


def init(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="The pool file.  [default: config/pool.yaml]")] = None,
) -> None:
    """Write a pool file of simulated replicas to begin from. Exits 2 if the file exists."""
    path: Path = config or context.obj
    text = files("gateway.config").joinpath("pool.yaml").read_text("utf-8").removeprefix(_FOR_EDITORS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = "it exists" if path.exists() else f"{error.filename}: {error.strerror}"
        raise UsageError(f"cannot write {path}: {reason}; give another name with --config") from None
    typer.echo(f"Wrote {path}: five simulated replicas. Serve them with `gateway --config {path}`.")
