"""What is taken over from another router, before it becomes a pool file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.speculation import Method
from backends.validation import UsageError
from gateway.config.urls import address
from gateway.importer.pool_text import Variable

_UNKNOWN = "how it speculates is not known: set method and speculative_config if it does"
_ORDER = ("server", "timeouts", "health", "models", "keys")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a replica speculates."""

    method: Method
    config: Mapping[str, Any] | None = None  # its `speculative_config`; None for a baseline
    note: str = ""  # what the reader should check; empty if it is certain


@dataclass(slots=True)
class Replica:
    """A replica at an address, or a source of replicas."""

    name: str
    model: str  # the name by which it serves its model
    where: dict[str, Any]  # `{"url": ...}`, or `{"kubernetes": ...}` for a source
    aliases: list[str] = field(default_factory=list)  # further names by which it serves
    # Names of clients that the router translated into `model`, which the gateway does not.
    renamed: list[str] = field(default_factory=list)
    api_key: Variable | None = None
    weight: float | None = None
    speculation: Speculation | None = None  # none if the configuration does not say
    notes: list[str] = field(default_factory=list)  # what is different or to be checked


@dataclass(slots=True)
class Configuration:
    """What another router was configured with, in the gateway's terms."""

    replicas: list[Replica] = field(default_factory=list)
    # The sections of the pool file besides `models`.
    settings: dict[str, dict[str, Any] | list[Any]] = field(default_factory=dict)
    policy: str = "learned"  # the policy of all models
    notes: list[str] = field(default_factory=list)  # what is different, not kept, or to be checked
    placeholders: dict[str, str] = field(default_factory=dict)  # values of variables for checking the pool file

    def put(self, section: str, key: str, value: object) -> None:
        """Set a key of a section of the pool file."""
        part = self.settings.setdefault(section, {})
        assert isinstance(part, dict)
        part[key] = value

    def note(self, text: str, *path: str) -> None:
        """Add a note on what could not be kept, or is to be checked; `path` is its place in the pool file."""
        self.notes.append(f"{'.'.join(path)}: {text}" if path else text)

    def set_policy(self, where: str, value: str, policies: Mapping[str, str]) -> None:
        """Set the policy that comes closest to a router's own."""
        if value not in policies:
            raise UsageError(f"{where} {value}: expected one of {', '.join(policies)}")
        self.policy = policies[value]
        self.note(f"{where} was {value}: the policy that comes closest is {self.policy}")

    def pool(self) -> dict[str, Any]:
        """Return the pool file's data, and add a note for everything that is not as it was."""
        if not self.replicas:
            raise UsageError("\n  ".join(["has no replica that the gateway can use", *self.notes]))
        models: dict[str, Any] = {}
        owners: dict[str, str] = {}  # of addresses and aliases: the model
        for replica in self.replicas:
            self._add(replica, replica.model, models, owners)
        for name, model in models.items():
            known = {alias for replica in self.replicas if replica.model == name for alias in replica.renamed}
            if renamed := [alias for alias in model["aliases"] if alias in known]:
                text = "requests keep their model's name: start the replicas with --served-model-name"
                self.note(" ".join([text, name, *renamed]), "models", name, "aliases")
            if not model["aliases"]:
                del model["aliases"]
        sections = {**self.settings, "models": models}
        return {name: sections[name] for name in _ORDER if name in sections}

    def _add(self, replica: Replica, name: str, models: dict[str, Any], owners: dict[str, str]) -> None:
        url = replica.where.get("url")
        owner = owners.get(str(url), name)
        if owner != name:
            self.note(f"{name} is served by a replica of {owner}, so it is an alias of it", "models", owner)
        for other in (other for other, model in models.items() if owner in model["aliases"]):
            models[other]["aliases"].remove(owner)
            self.note(f"{owner} was also a name of {other}; here a name belongs to one model", "models", other)
        model = models.setdefault(owner, {"aliases": [], "policy": {"name": self.policy}})
        for alias in (name, *replica.aliases, *replica.renamed):
            self._alias(owner, alias, models)
        if url in owners:
            return  # the same replica once more, by another name
        if url is not None:
            owners[url] = name
        part = "backends" if url is not None else "discover"
        key = _unused(replica.name, model.get(part, {}))
        known = replica.speculation or Speculation(Method.BASELINE, note=_UNKNOWN)
        entry = {"method": known.method.value, **replica.where, "speculative_config": known.config}
        entry |= {"api_key": replica.api_key, "weight": replica.weight}
        model.setdefault(part, {})[key] = {name: value for name, value in entry.items() if value is not None}
        for text in [*replica.notes, *([known.note] if known.note else [])]:
            self.note(text, "models", name, part, key)

    def _alias(self, owner: str, alias: str, models: dict[str, Any]) -> None:
        if alias == owner or alias in models[owner]["aliases"]:
            return
        taken = next((name for name, model in models.items() if alias == name or alias in model["aliases"]), None)
        if taken is not None:
            text = f"{alias} was also a name of {owner}; here a name belongs to one model"
            self.note(text, "models", taken)
            return
        models[owner]["aliases"].append(alias)


def url_of(text: str) -> str | None:
    """Return the address of a replica without the `/v1` at its end; None if the gateway cannot use it.

    Examples
    --------
    >>> url_of("http://10.0.0.1:8000/v1/"), url_of("http://10.0.0.1:8000/engines/a")
    ('http://10.0.0.1:8000', None)
    """
    try:
        return address(re.sub(r"/v1/?$", "", text.strip()))
    except ValueError:
        return None


def name_of(text: str) -> str:
    """Return a valid name of a backend: for an address its host and port.

    Examples
    --------
    >>> name_of("http://10.0.0.1:8000"), name_of("a b")
    ('10.0.0.1:8000', 'a-b')
    """
    return re.sub(r"[^A-Za-z0-9._:/-]+", "-", re.sub(r"^[a-z]+://", "", text)).strip("-") or "replica"


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number, unused = 2, name
    while unused in taken:
        unused, number = f"{name}-{number}", number + 1
    return unused
