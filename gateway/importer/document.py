"""The file of another router's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from backends.validation import UsageError

_MAX_BYTES = 2**20


def read_mapping(path: Path) -> dict[str, object]:
    """Return the YAML document in a file, which is a mapping."""
    try:
        document = yaml.safe_load(_read_text(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UsageError(f"{path}{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{path}: not YAML") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: expected a mapping of `key: value`")
    return {str(key): value for key, value in document.items()}


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise UsageError(f"{path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path}: larger than 1 MiB, which no configuration is")
    return text


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a document that is a mapping; empty if it is not there."""
    part = config.get(name)
    if part is not None and not isinstance(part, Mapping):
        raise UsageError(f"{name}: expected a mapping of `key: value`")
    return part or {}
