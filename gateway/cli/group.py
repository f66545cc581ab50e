"""A group of subcommands that prints wrong usage as one message, without a traceback."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from backends.validation import UsageError

_WRONG_USAGE = 2


class CommandGroup(TyperGroup):
    """Prints a `UsageError` of any subcommand, prefixed with the command's name, and exits 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand that the context names."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            from gateway.config.load import ConfigError

            own_prefix = isinstance(error, ConfigError)  # each of its lines begins with the file's name
            typer.echo(str(error) if own_prefix else f"{_name(ctx)}: {error}", err=True)
            raise typer.Exit(_WRONG_USAGE) from None


def _name(ctx: Any) -> str:
    """Return the command as its user typed it: `gateway trace show`."""
    names = [ctx.invoked_subcommand]
    while ctx.parent is not None:
        names.append(ctx.info_name)
        ctx = ctx.parent
    return " ".join(["gateway", *filter(None, reversed(names))])
