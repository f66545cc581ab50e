"""Loading the pool file. All errors are reported at once, each with its line and a hint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from backends import validation
from backends.calibration.files import paths_from
from backends.files.regular import read_text
from backends.files.yaml import Document, Position, read_yaml
from backends.validation import Issue, UsageError, issues_of
from gateway.config.pool_file import PoolFile
from gateway.config.settings import AdminSettings, KeySettings, PoolSettings
from gateway.config.short_forms import written_out

_MOST_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One error in the pool file.

    Examples
    --------
    >>> print(Problem(6, 9, "server.prot", "unknown key", "did you mean 'port'?"))
    6:9: server.prot: unknown key; did you mean 'port'?
    """

    # line, column: counted from 1.
    line: int
    column: int
    where: str  # path of the key, as `models.llama.backends.plain.method`; empty for the file as a whole
    message: str  # the error
    hint: str = ""  # how to correct it; may be empty

    def __str__(self) -> str:
        """Return one line, without the name of the file."""
        text = f"{self.line}:{self.column}: "
        text += f"{self.where}: " if self.where else ""
        return text + self.message + (f"; {self.hint}" if self.hint else "")


class ConfigError(UsageError):
    """Raised for a pool file that cannot be used."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.path = path  # the file
        self.problems = sorted(set(problems))  # all errors in it, in file order
        super().__init__(path, problems)

    def __str__(self) -> str:
        """Return one line per problem, in the form `file:line:column: ...` of a compiler."""
        return "\n".join(f"{self.path}:{problem}" for problem in self.problems)


def load_pool(path: Path, environ: Mapping[str, str] = os.environ) -> PoolSettings:
    """Read the pool file."""
    try:
        text = read_text(path, _MOST_BYTES)
    except OSError as error:
        hint = (
            "set the file with --config, or write one with `gateway init`"
            if isinstance(error, FileNotFoundError)
            else ""
        )
        raise ConfigError(path, [Problem(1, 1, "", f"cannot read it: {error.strerror}", hint)]) from None
    document = read_yaml(text, environ)
    problems = [_problem(issue, position) for position, issue in document.issues]
    settings: PoolSettings | None = None
    if document.data is None and not problems:
        problems.append(Problem(1, 1, "", "empty", "`gateway init` writes an example"))
    elif document.data is not None:
        try:
            with paths_from(path.absolute().parent):
                settings = PoolFile.model_validate(document.data)
        except ValidationError as error:
            problems += _located(issues_of(error, PoolFile), document)
    if problems or settings is None:
        raise ConfigError(path, problems)
    return settings


def located(path: Path, issues: Iterable[Issue]) -> list[Problem]:
    """Return the issues of a readable pool file, with their places in the file."""
    document = read_yaml(read_text(path, _MOST_BYTES), os.environ)
    return sorted(set(_located(list(issues), document)))


def _located(issues: list[Issue], document: Document) -> list[Problem]:
    # A value that failed to parse was replaced by null, which validation would report a second time.
    broken = {issue.path for _, issue in document.issues}
    return [
        _problem(issue, document.position(replace(issue, path=_as_written(issue.path, document.data))))
        for issue in issues
        if issue.path not in broken
    ]


def _as_written(path: validation.Path, data: Any) -> validation.Path:
    """Return a settings path as the file writes it, where replicas may be a list."""
    if len(path) < 4 or path[2] != "backends" or not isinstance(data["models"][path[1]]["backends"], list):
        return path
    named = list(written_out(data)["models"][path[1]]["backends"])
    return (*path[:3], named.index(path[3]), *path[4:])


def _problem(issue: Issue, position: Position) -> Problem:
    return Problem(position.line, position.column, _where(issue), issue.message, issue.hint)


def _where(issue: Issue) -> str:
    text = ""
    for step in _printable(issue.path):
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _printable(path: validation.Path) -> validation.Path:
    """Return the part of `path` without mapping keys that could be an API key pasted in the wrong position."""
    if path and path[0] in {"keys", "admin"}:
        known = {*KeySettings.model_fields, *AdminSettings.model_fields}
        return (path[0], *takewhile(lambda step: isinstance(step, int) or step in known, path[1:]))
    return path[: path.index("api_key") + 1] if "api_key" in path else path
