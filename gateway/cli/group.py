"""A group of subcommands that reports wrong usage without a traceback."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from backends.validation import UsageError
from gateway.cli.output import say

_WRONG_USAGE = 2


class CommandGroup(TyperGroup):
    """A command group that prints the `UsageError` of a subcommand, with the command's name, and exits 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand of the context."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            from gateway.config.load import ConfigError

            has_prefix = isinstance(error, ConfigError)  # its lines begin with the name of the file
            say(str(error) if has_prefix else f"{_name(ctx)}: {error}", err=True)
            raise typer.Exit(_WRONG_USAGE) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of subcommands, by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            group = command.rich_help_panel if isinstance(command.rich_help_panel, str) else "Commands"
            groups.setdefault(group, []).append((name, command.get_short_help_str(formatter.width - 16)))
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows)


def _name(ctx: Any) -> str:
    """Return the command as typed: `gateway trace show`."""
    names = [ctx.invoked_subcommand]
    while ctx.parent is not None:
        names.append(ctx.info_name)
        ctx = ctx.parent
    return " ".join(["gateway", *filter(None, reversed(names))])
