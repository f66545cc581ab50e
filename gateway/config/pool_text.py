"""The text of a pool file: settings in block style, with comments at their places."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from backends.reported import printable
from backends.validation import Path, UsageError, issues_of

_WIDTH = 110
_FLOW = frozenset({"policy", "kubernetes", "speculative_config", "cors"})
_REFERENCE = re.compile(r"(?<!\$)\$\{(\w+)\}")


class Variable(str):
    """A reference to an environment variable, `${NAME}`; in any other text, `${` is escaped."""

    __slots__ = ()


def pool_text(settings: Mapping[str, Any], notes: Sequence[tuple[Path, str]], head: Sequence[str]) -> str:
    """Return the text of a pool file.

    Examples
    --------
    >>> print(pool_text({"server": {"port": 1}}, [(("server", "port"), "was 2")], ["A pool."]), end="")
    # A pool.
    server:
      # was 2
      port: 1
    """
    comments: dict[Path, list[str]] = {}
    for path, text in notes:
        place = _nearest(settings, path)
        if text not in comments.setdefault(place, []):
            comments[place].append(text)
    lines = [line for paragraph in [*head, *comments.get((), [])] for line in _comment(paragraph, "")]
    lines += _mapping(settings, (), comments)
    return "\n".join(lines) + "\n"


def check_text(text: str) -> None:
    """Check a pool file as `gateway check` does, with a value in place of each variable."""
    from backends.files.yaml import read_yaml
    from gateway.config.pool_file import PoolFile

    document = read_yaml(text, {name: f"{name}-value" for name in _REFERENCE.findall(text)})
    issues = [issue for _, issue in document.issues]
    try:
        PoolFile.model_validate(document.data)
    except ValidationError as error:
        issues += issues_of(error, PoolFile)
    if issues:
        raise UsageError("\n  ".join(["no valid pool file comes of it:", *map(str, issues)]))


def _nearest(settings: Any, path: Path) -> Path:
    found = 0
    for step in path:
        if not isinstance(settings, Mapping) or step not in settings:
            break
        settings, found = settings[step], found + 1
    return path[:found]


def _mapping(settings: Mapping[str, Any], path: Path, comments: Mapping[Path, list[str]]) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in settings.items():
        below = (*path, key)
        for text in comments.get(below, []):
            yield from _comment(text, indent)
        is_annotated = any(place[: len(below)] == below and place != below for place in comments)
        if isinstance(value, Mapping) and (key not in _FLOW or is_annotated or not path):
            yield f"{indent}{_flow(key)}:"
            yield from _mapping(value, below, comments)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{_flow(key)}:"
            yield from (f"{indent}  - {_flow(item)}" for item in value)
        else:
            yield f"{indent}{_flow(key)}: {_flow(value)}"


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(_plain(value), default_flow_style=True, width=2**31, sort_keys=False, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Variable):
        return str(value)
    return value.replace("${", "$${") if isinstance(value, str) else value


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
