"""What commands print."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from backends.reported import printable

AsJson = Annotated[bool, typer.Option("--json", help="Print the data as JSON.")]


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print lines, escaped so that text from an engine, a client or a gateway cannot control the terminal."""
    typer.echo("\n".join(map(printable, text.split("\n"))), err=err, nl=nl)


def say_json(document: Any) -> None:
    """Print a document as one line of JSON, for other programs."""
    say(json.dumps(document, default=asdict).replace("\x7f", r"\u007f"))
