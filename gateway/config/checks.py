"""Checks between the models, backends and keys of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from backends.validation import Issue, Path, did_you_mean
from gateway.config.urls import address


def pool_issues(pool: Mapping[str, Any]) -> Iterator[Issue]:
    """Yield every conflict in the unchecked data of a pool."""
    models = {str(name): _fields(model) for name, model in _fields(pool.get("models")).items()}
    yield from _name_issues(models)
    yield from _address_issues(models)
    keys = _items(pool.get("keys"))
    yield from _key_issues(keys, models)
    classes = list(_fields(pool.get("slo_classes")))
    for index, key in enumerate(map(_fields, keys)):
        if isinstance(name := key.get("slo_class"), str) and name not in classes:
            yield Issue(("keys", index, "slo_class"), "no such class in slo_classes", did_you_mean(name, classes))


def _name_issues(models: Mapping[str, Mapping[str, Any]]) -> Iterator[Issue]:
    taken = dict.fromkeys(models, "a model's name")
    for name, model in models.items():
        for index, alias in enumerate(_items(model.get("aliases"))):
            if not isinstance(alias, str):
                continue
            if alias in taken:
                yield Issue(
                    ("models", name, "aliases", index), f"'{alias}' is already {taken[alias]}", "choose another"
                )
            taken.setdefault(alias, f"an alias of {name}")


def _address_issues(models: Mapping[str, Mapping[str, Any]]) -> Iterator[Issue]:
    taken: dict[str, str] = {}
    for name, model in models.items():
        for key, backend in _fields(model.get("backends")).items():
            url = _fields(backend).get("url")
            try:
                canonical = address(url) if isinstance(url, str) else None
            except ValueError:
                continue  # reported where the url is checked
            if canonical in taken:
                path = ("models", name, "backends", key, "url")
                hint = "list a replica once; use aliases for further model names"
                yield Issue(path, f"already the address of {taken[canonical]}", hint)
            elif canonical is not None:
                taken[canonical] = f"{name}'s {key}"


def _key_issues(keys: list[Any], models: Mapping[str, Mapping[str, Any]]) -> Iterator[Issue]:
    owners = {alias: name for name, model in models.items() for alias in map(str, _items(model.get("aliases")))}
    names: dict[str, int] = {}
    secrets: dict[str, int] = {}
    for index, item in enumerate(keys):
        entry = _fields(item)
        name, secret = entry.get("name"), entry.get("key") if entry else item
        if isinstance(name, str) and names.setdefault(name, index) != index:
            yield Issue(("keys", index, "name"), f"already the name of keys[{names[name]}]", "choose another")
        if isinstance(secret, str) and secret and secrets.setdefault(secret, index) != index:
            path: Path = ("keys", index, "key") if entry else ("keys", index)
            yield Issue(path, f"the same key as keys[{secrets[secret]}]", "each entry needs its own key")
        for position, model in enumerate(_items(entry.get("models"))):
            if isinstance(model, str) and models and model not in models:
                owner = owners.get(model)
                hint = did_you_mean(model, models) if owner is None else f"it is an alias: write '{owner}'"
                yield Issue(("keys", index, "models", position), "no such model", hint)


def _fields(value: object) -> Mapping[str, Any]:
    """Return the items of a mapping; empty for anything else."""
    return value if isinstance(value, Mapping) else {}


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
