"""Commands of the laboratory, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from typer.testing import CliRunner

from gateway.cli.app import app


def run(command: str, *arguments: object) -> tuple[int, str, str]:
    """Run a command; return its exit status, and what it printed on standard output and error."""
    result = CliRunner(env={"OPENAI_API_KEY": None}).invoke(app, [*command.split(), *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(command: str, *arguments: object) -> str:
    """Run a command that prints nothing and exits 2; return what it says on standard error."""
    status, printed, error = run(command, *arguments)
    assert (status, printed) == (2, "")
    return error


def figures(command: str, folder: Path, *arguments: object) -> tuple[str, dict[str, Any]]:
    """Run a command that exits 0; return what it printed and what it wrote to --json."""
    out = folder / "figures.json"
    status, printed, error = run(command, *arguments, "--json", out)
    assert status == 0, error
    return printed, orjson.loads(out.read_bytes())
