"""`gateway schema`: the JSON schema of a pool file."""

from __future__ import annotations

import typer


def schema() -> None:
    """Print the JSON schema of a pool file."""
    from gateway.config.schema import schema_text

    typer.echo(schema_text(), nl=False)
