"""What commands print."""

from __future__ import annotations

import typer

from backends.reported import printable


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print lines; what an engine, a client or a gateway says in them steers no terminal."""
    typer.echo("\n".join(map(printable, text.split("\n"))), err=err, nl=nl)
