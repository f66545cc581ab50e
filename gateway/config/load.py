"""Loading the pool file: every error with its line and what would be right, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from pydantic import ValidationError

from backends import validation
from backends.validation import Issue, UsageError, issues_of
from gateway.config.settings import AdminSettings, KeySettings, PoolSettings
from gateway.config.yaml import Document, Place, read_yaml


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One error in the pool file.

    Parameters
    ----------
    line, column
        Counted from 1.
    where
        The keys that lead to it, as `models.llama.backends.plain.method`; empty for the file as a whole.
    message, hint
        What is wrong, and what would be right; the hint may be empty.
    """

    line: int
    column: int
    where: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        """Return it as one line, without the file's name."""
        text = f"{self.line}:{self.column}: "
        text += f"{self.where}: " if self.where else ""
        return text + self.message + (f"; {self.hint}" if self.hint else "")


class ConfigError(UsageError):
    """A pool file that cannot be used.

    Parameters
    ----------
    path
        The file.
    problems
        All that is wrong with it, in the order of the file.
    """

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.path = path
        self.problems = sorted(set(problems))
        super().__init__(path, problems)

    def __str__(self) -> str:
        """Return one line for each problem, with the file's name as a compiler gives it."""
        return "\n".join(f"{self.path}:{problem}" for problem in self.problems)


def load_pool(path: Path, environ: Mapping[str, str] = os.environ) -> PoolSettings:
    """Read the pool file.

    Parameters
    ----------
    path
        A YAML file.
    environ
        The variables for `${NAME}` and `${NAME:-default}`.

    Raises
    ------
    ConfigError
        If the file cannot be read, or anything in it is wrong. Nothing in it shows a key's value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "give the file with --config" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(path, [Problem(1, 1, "", f"cannot read it: {error.strerror}", hint)]) from None
    except UnicodeDecodeError:
        raise ConfigError(path, [Problem(1, 1, "", "not text in UTF-8", "save it so")]) from None
    document = read_yaml(text, environ)
    problems = [_problem(issue, place) for place, issue in document.issues]
    settings: PoolSettings | None = None
    if document.data is None and not problems:
        problems.append(Problem(1, 1, "", "empty", "config/pool.yaml is an example to begin with"))
    elif document.data is not None:
        try:
            settings = PoolSettings.model_validate(document.data)
        except ValidationError as error:
            problems += _located(issues_of(error, PoolSettings), document)
    if problems or settings is None:
        raise ConfigError(path, problems)
    return settings


def _located(found: list[Issue], document: Document) -> list[Problem]:
    # A value that YAML or a variable already made wrong is not reported a second time for what it then lacks.
    broken = {issue.path for _, issue in document.issues}
    return [_problem(issue, document.place(issue)) for issue in found if issue.path not in broken]


def _problem(issue: Issue, place: Place) -> Problem:
    return Problem(place.line, place.column, _where(issue), issue.message, issue.hint)


def _where(issue: Issue) -> str:
    text = ""
    for step in _shown(issue.path):
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _shown(path: validation.Path) -> validation.Path:
    """Return the part of `path` that may be printed: a key pasted where its name belongs is not to be seen."""
    if path and path[0] in {"keys", "admin"}:
        known = {*KeySettings.model_fields, *AdminSettings.model_fields}
        return (path[0], *takewhile(lambda step: isinstance(step, int) or step in known, path[1:]))
    return path[: path.index("api_key") + 1] if "api_key" in path else path
