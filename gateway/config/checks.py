"""What cannot stand together in one pool: the checks between models, backends and keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, SecretStr

from backends.validation import Issue, Path, did_you_mean
from gateway.config.urls import address


def pool_faults(pool: Mapping[str, Any]) -> Iterator[Issue]:
    """Yield every conflict in `pool`: raw data of which nothing is sure, or settings already checked."""
    models = {str(name): _fields(model) for name, model in _fields(pool.get("models")).items()}
    yield from _names_taken(models)
    yield from _addresses_taken(models)
    yield from _key_faults(_items(pool.get("keys")), models)


def _names_taken(models: Mapping[str, Mapping[str, Any]]) -> Iterator[Issue]:
    taken = dict.fromkeys(models, "a model's name")
    for name, model in models.items():
        for index, alias in enumerate(_items(model.get("aliases"))):
            if not isinstance(alias, str):
                continue
            if alias in taken:
                yield Issue(("models", name, "aliases", index), f"'{alias}' is already {taken[alias]}", "take another")
            taken.setdefault(alias, f"an alias of {name}")


def _addresses_taken(models: Mapping[str, Mapping[str, Any]]) -> Iterator[Issue]:
    taken: dict[str, str] = {}
    for name, model in models.items():
        for key, backend in _fields(model.get("backends")).items():
            url = _fields(backend).get("url")
            try:
                where = address(url) if isinstance(url, str) else None
            except ValueError:
                continue  # reported where the url is checked
            if where in taken:
                path = ("models", name, "backends", key, "url")
                hint = "a replica stands once in a pool; its further names go under aliases"
                yield Issue(path, f"already the address of {taken[where]}", hint)
            elif where is not None:
                taken[where] = f"{name}'s {key}"


def _key_faults(keys: list[Any], models: Mapping[str, Mapping[str, Any]]) -> Iterator[Issue]:
    owners = {alias: name for name, model in models.items() for alias in map(str, _items(model.get("aliases")))}
    names: dict[str, int] = {}
    secrets: dict[str, int] = {}
    for index, item in enumerate(keys):
        entry = _fields(item)
        name, secret = entry.get("name"), _secret(entry.get("key") if entry else item)
        if isinstance(name, str) and names.setdefault(name, index) != index:
            yield Issue(("keys", index, "name"), f"already the name of keys[{names[name]}]", "take another")
        if secret and secrets.setdefault(secret, index) != index:
            path: Path = ("keys", index, "key") if entry else ("keys", index)
            yield Issue(path, f"the same key as keys[{secrets[secret]}]", "give each its own")
        for place, model in enumerate(_items(entry.get("models"))):
            if isinstance(model, str) and models and model not in models:
                owner = owners.get(model)
                hint = did_you_mean(model, models) if owner is None else f"it is an alias: write '{owner}'"
                yield Issue(("keys", index, "models", place), "no such model", hint)


def _fields(value: object) -> Mapping[str, Any]:
    """Return the keys of a mapping or of a model already checked; nothing for anything else."""
    if isinstance(value, BaseModel):
        return vars(value)
    return value if isinstance(value, Mapping) else {}


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _secret(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return value if isinstance(value, str) else ""
