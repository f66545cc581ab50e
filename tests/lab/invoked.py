"""Commands of the laboratory, in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from gateway.cli.app import app


def run(command: str, *arguments: object) -> tuple[int, str, str]:
    """Run a command; return its exit status, and what it printed on standard output and error."""
    result = CliRunner(env={"OPENAI_API_KEY": None}).invoke(app, [*command.split(), *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
