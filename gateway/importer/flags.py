"""Command lines: their flags, from the words themselves or from a file with the command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from backends.files import regular as files
from backends.validation import UsageError

_MAX_BYTES = 2**20
_FLAG = re.compile(r"--?[A-Za-z]")


class Flags:
    """The flags of a command, each with the values of all its uses; `--a_b` and `--a-b` are one flag.

    Examples
    --------
    >>> flags = Flags(["vllm-router", "--worker-urls", "http://a", "http://b", "--policy=random", "--log"])
    >>> flags.values("--worker-urls"), flags.text("--policy"), "--log" in flags
    (['http://a', 'http://b'], 'random', True)
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        self._read: set[str] = set()
        current: list[str] | None = None
        for word in words:
            if _FLAG.match(word):
                name, has_value, value = word.partition("=")
                name, *keys = name.split(".")
                name = name.replace("_", "-")
                current = self._values.setdefault(".".join([name, *keys]), [])
                if has_value:
                    current.append(value)
            elif current is not None:
                current.append(word)

    def __contains__(self, name: str) -> bool:
        self._read.add(name)
        return name in self._values

    def __bool__(self) -> bool:
        return bool(self._values)

    def values(self, name: str) -> list[str]:
        """Return all values of a flag."""
        self._read.add(name)
        return self._values.get(name, [])

    def text(self, name: str) -> str | None:
        """Return the value of a flag; None without the flag."""
        values = self.values(name)
        if name in self._values and not values:
            raise UsageError(f"{name} needs a value")
        return values[-1] if values else None

    def number(self, name: str) -> float | None:
        """Return the value of a flag as a number; None without the flag."""
        text = self.text(name)
        try:
            number = None if text is None else float(text)
        except ValueError:
            raise UsageError(f"{name}: expected a number") from None
        return int(number) if number is not None and number.is_integer() else number

    def listed(self, name: str) -> list[str]:
        """Return the parts of a flag's value between commas."""
        return [part.strip() for part in (self.text(name) or "").split(",") if part.strip()]

    def below(self, name: str) -> dict[str, str]:
        """Return the values of `name.key` flags, by key."""
        found = {key: values[-1] for key, values in self._values.items() if key.startswith(f"{name}.") and values}
        self._read.update(found)
        return {key.removeprefix(f"{name}."): value for key, value in found.items()}

    def rest(self) -> list[str]:
        """Return the flags that were not read."""
        return [name for name in self._values if name not in self._read]


def read_text(path: Path) -> str:
    """Return the text of a file."""
    try:
        return files.read_text(path, _MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{path}: cannot read it: {error.strerror}") from None


def read_mapping(path: Path) -> dict[str, object]:
    """Return the YAML document in a file, which is a mapping."""
    try:
        document = yaml.safe_load(read_text(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UsageError(f"{path}{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{path}: not YAML") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: expected a mapping of `key: value`")
    return {str(key): value for key, value in document.items()}


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a document that is a mapping; empty if it is not there."""
    part = config.get(name)
    if part is not None and not isinstance(part, Mapping):
        raise UsageError(f"{name}: expected a mapping of `key: value`")
    return part or {}


def command_words(text: str, path: Path, commands: Iterable[str]) -> list[str]:
    """Return the words of the command in a file, which may be a script."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = [line for line in lines if any(word in line for word in commands) and "--" in line.split("#")[0]]
    if not found and text.lstrip().startswith("--"):
        found = [" ".join(lines)]
    if not found:
        raise UsageError(f"{path}: no command {' or '.join(commands)} with flags in it")
    try:
        words = shlex.split(found[0], comments=True)
    except ValueError as error:
        raise UsageError(f"{path}: the command cannot be read: {error}") from None
    return words[:-1] if words[-1:] == ["&"] else words


def flags_of(words: Sequence[str], commands: Iterable[str]) -> Flags:
    """Return the flags in words: the flags themselves, or a file with the command."""
    if len(words) == 1 and not words[0].startswith("-"):
        path = Path(words[0])
        words = command_words(read_text(path), path, commands)
    flags = Flags(words)
    if not flags:
        raise UsageError("expected a file, or flags such as --host 0.0.0.0")
    return flags
