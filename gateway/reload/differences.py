"""Differences between two pool files, as lines for the log, without secrets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, SecretStr

from gateway.config.settings import BackendSettings, PoolSettings
from gateway.gateway import Room

_HIDDEN = frozenset({"key", "sha256", "env", "api_key", "redis"})
"""Keys whose values are secrets or may contain some."""
_RESTART = (
    "server.host",
    "server.port",
    "server.reuse_port",
    "server.tls",
    "server.workers",
    "admin.listen",
    "state",
    "telemetry.log_format",
)
"""Prefixes of keys that take effect only at a start, besides those of the rooms."""
_MOST_CHARS = 200


def differences(old: PoolSettings, new: PoolSettings) -> list[str]:
    """Return one line per key that differs, such as `models.llama.backends.c.url: http://a -> http://b`."""
    written = ".policy.settings.", ".policy."  # a pool file has them beside the policy's name
    lines = [f"{path.replace(*written)}: {text}" for path, text in _differences("", old, new)]
    if old.keys and not new.keys:
        lines.append("keys: none is left, so anyone who can reach this address can use it")
    return lines


def needs_restart(old: PoolSettings, new: PoolSettings, rooms: Iterable[type[Room]]) -> list[str]:
    """Return the lines of `differences` that a reload cannot apply."""
    kinds = [*rooms]
    keys = (*_RESTART, *(key for room in kinds for key in room.restart_keys))
    own = {key: None for room in kinds for key in room.own_keys}
    lines = [
        f"{path}: {text}"
        for path, text in _differences("", old, new)
        if any(path == key or path.startswith(f"{key}.") for key in keys)
    ]
    before, after = _started(old, new, own), _started(new, old, own)
    return lines + [f"{path}: {text}" for path, text in _differences("models", before, after)]


def _started(settings: PoolSettings, others: PoolSettings, own: Mapping[str, None]) -> dict[str, Any]:
    """Return the settings on which processes of replicas that the gateway starts depend, without keys of rooms.

    Engines that it starts under both settings are left out: a reload restarts each.
    """
    started: dict[str, Any] = {}
    for name, model in settings.models.items():
        backends = {key: backend for key, backend in model.backends.items() if backend.url is None}
        known = others.models[name].backends if name in others.models else {}
        for key, backend in backends.items():
            if backend.serve is not None and key in known and known[key].serve is not None:
                continue
            limit = backend.drafter_limit if backend.simulate else None  # engines do not get it
            update = {"weight": 1.0, "drafter_limit": limit, **own}
            started[f"{name}.backends.{key}"] = backend.model_copy(update=update)
        if backends:
            started[f"{name}.aliases"] = model.aliases
    return started


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, str]]:
    if old == new:
        return
    before, after = _parts(old), _parts(new)
    if before is None or after is None:
        yield path, _changed(path, old, new)
        return
    for key in [*before, *(key for key in after if key not in before)]:
        inner = f"{path}[{key}]" if isinstance(old, Sequence) else f"{path}.{key}" if path else key
        if key not in after:
            yield inner, "removed"
        elif key not in before:
            yield inner, f"added{_summary(after[key])}"
        else:
            yield from _differences(inner, before[key], after[key])
    if isinstance(old, Sequence) and [key for key in before if key in after] != [key for key in after if key in before]:
        yield path, _changed(path, old, new)  # the order differs, which may matter


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the parts of a value by key; None if it is shown as a whole."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    if isinstance(value, Sequence) and all(isinstance(each, BaseModel) and hasattr(each, "name") for each in value):
        return {each.name: each for each in value}  # keys, or rules of a policy
    return None


def _changed(path: str, old: Any, new: Any) -> str:
    if not _HIDDEN.isdisjoint(path.split(".")) or any(isinstance(each, SecretStr) for each in (old, new)):
        return "changed"
    return f"{_shown(old)} -> {_shown(new)}"


def _summary(value: Any) -> str:
    if not isinstance(value, BackendSettings):
        return ""
    where = value.url or ("started by the gateway" if value.serve is not None else "simulated")
    return f" ({value.method}, {where})"


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = getattr(value, "name", "set")
    elif value is None:
        value = "not set"
    elif isinstance(value, frozenset):
        value = f"[{', '.join(sorted(map(_shown, value)))}]"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        value = f"[{', '.join(map(_shown, value))}]"
    text = str(value)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
