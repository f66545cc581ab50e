"""Another method for one backend of a pool file; everything else stays as it is written, comments included."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from backends.speculation import Method
from backends.validation import UsageError
from gateway.config.load import ConfigError, load_pool
from gateway.config.settings import PoolSettings
from gateway.config.settings.backend import BackendSettings

_CONFIG = "speculative_config"


def with_method(text: str, model: str, backend: str, method: Method, config: Mapping[str, Any]) -> str:
    """Return the text of a pool file in which a backend has another method and speculative config.

    Only the two values change; a comment inside the old config is lost with it.

    Raises
    ------
    UsageError
        If the backend is not written in the file as a mapping of its own.

    Examples
    --------
    >>> print(with_method("models: {m: {backends: {a: {method: baseline, url: u}}}}", "m", "a", Method.SUFFIX, {}))
    models: {m: {backends: {a: {method: suffix, url: u}}}}
    """
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in ("models", model, "backends", backend):
        node = _value(node, key)
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(f"models.{model}.backends.{backend} is not written out in the pool file")
    by_key = {key.value: (key, value) for key, value in node.value}
    edits: list[tuple[int, int, str]] = []
    flow = bool(node.flow_style)
    if "method" not in by_key:
        raise UsageError(f"models.{model}.backends.{backend} has no `method` of its own in the pool file")
    _, written = by_key["method"]
    edits.append((written.start_mark.index, written.end_mark.index, method.value))
    shown = yaml.safe_dump(dict(config), default_flow_style=True, sort_keys=False, width=1 << 20).strip()
    shown = shown.replace("${", "$${")
    if _CONFIG in by_key:
        key, value = by_key[_CONFIG]
        start, end = key.start_mark.index, _end(value)
        if config:
            edits.append((start, end, f"{_CONFIG}: {shown}"))
        elif flow:
            edits.append((start, end, f"{_CONFIG}: null"))
        else:
            edits.append((_line_start(text, start), _line_end(text, end), ""))
    elif config and flow:
        edits.append((written.end_mark.index, written.end_mark.index, f", {_CONFIG}: {shown}"))
    elif config:
        at = _line_end(text, written.end_mark.index)
        newline = "" if text[:at].endswith("\n") else "\n"
        indent = " " * by_key["method"][0].start_mark.column
        edits.append((at, at, f"{newline}{indent}{_CONFIG}: {shown}\n"))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def rewrite(path: Path, model: str, backend: str, method: Method, config: Mapping[str, Any]) -> None:
    """Change the method and speculative config of one backend in a pool file, or nothing.

    The new file is read before it takes the place of the old one.

    Raises
    ------
    UsageError
        If the file cannot be written, or would then have other settings than the two.
    """
    path = path.resolve()
    fresh = path.with_name(f".{path.name}.new")
    try:
        text = with_method(path.read_text(encoding="utf-8"), model, backend, method, config)
        wanted = _with_method(load_pool(path), model, backend, method, config)
        fresh.write_text(text, encoding="utf-8")
        shutil.copymode(path, fresh)
        if load_pool(fresh) != wanted:
            raise UsageError(
                f"{path}: models.{model}.backends.{backend} shares its lines with others; write its `method` and "
                f"`{_CONFIG}` out, or change it by hand"
            )
        os.replace(fresh, path)
    except ConfigError as error:
        raise UsageError(f"{path} would not be valid: {error}") from None
    except (OSError, ValidationError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be changed: {error}") from None
    finally:
        fresh.unlink(missing_ok=True)


def _with_method(
    settings: PoolSettings, model: str, backend: str, method: Method, config: Mapping[str, Any]
) -> PoolSettings:
    served = settings.models[model]
    old = served.backends[backend].model_dump(exclude_unset=True)
    changed = BackendSettings.model_validate(old | {"method": method, _CONFIG: dict(config) or None})
    backends = served.backends | {backend: changed}
    return settings.model_copy(
        update={"models": settings.models | {model: served.model_copy(update={"backends": backends})}}
    )


def _value(node: Any, key: str) -> Any:
    for name, value in getattr(node, "value", ()) if isinstance(node, yaml.MappingNode) else ():
        if name.value == key:
            return value
    return None


def _end(node: Any) -> int:
    """Return where a value ends; the end of a block that YAML tells lies before the next key, behind its comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_start(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1


def _line_end(text: str, index: int) -> int:
    """Return the beginning of the next line."""
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1
