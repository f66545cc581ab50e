"""What is taken over from another router, before it becomes a pool file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

from backends.speculation import Method
from backends.validation import Path, UsageError
from gateway.config.pool_text import Variable
from gateway.config.settings import HealthSettings, ServerSettings
from gateway.config.short_forms import name_of
from gateway.config.urls import address

_UNKNOWN = "how it speculates is not known: set method and speculative_config if it does"
_ORDER = ("server", "timeouts", "health", "models", "keys", "cors")
NAME = re.compile(r"[A-Za-z0-9._:/-]+")
MAY_LIST = "the gateway's account must list and watch EndpointSlices: deploy/helm/speculation-gateway has the role"


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
    model: str | None  # the name by which it serves its model; None if the configuration does not say
    where: dict[str, Any]  # `{"url": ...}`, or `{"kubernetes": ...}` for a source
    aliases: list[str] = field(default_factory=list)  # further names by which it serves
    # Names of clients that the router translated into `model`, which the gateway does not.
    renamed: list[str] = field(default_factory=list)
    api_key: Variable | None = None
    weight: float | None = None
    speculation: Speculation | None = None  # none if the configuration does not say
    notes: list[str] = field(default_factory=list)  # comments for its place in the pool file


@dataclass(frozen=True, slots=True)
class Router:
    """What the words of another router are here: its part of `routers.yaml`."""

    policies: Mapping[str, Sequence[str]]
    reasons: Mapping[str, str]

    @classmethod
    def of(cls, name: str) -> Router:
        """Return the part of a router."""
        return cls(**yaml.safe_load(files("gateway.importer").joinpath("routers.yaml").read_text("utf-8"))[name])

    def not_kept(self, setting: str) -> str:
        """Return that a setting is not kept, and why."""
        reason = next((text for start, text in self.reasons.items() if setting.startswith(start)), "")
        return f"{setting}: not kept" + (f"; {reason}" if reason else "")


@dataclass(slots=True)
class Configuration:
    """What another router was configured with, in the gateway's terms."""

    router: Router
    replicas: list[Replica] = field(default_factory=list)
    # The sections of the pool file besides `models`.
    settings: dict[str, dict[str, Any] | list[Any]] = field(default_factory=dict)
    # policy, policy_note: the policy of all models, and in what it differs from what it was.
    policy: str = "learned"
    policy_note: str = ""
    # What could not be kept, each with its place in the pool file.
    notes: list[tuple[Path, str]] = field(default_factory=list)
    placeholders: dict[str, str] = field(default_factory=dict)  # values of variables for checking the pool file

    def put(self, section: str, key: str, value: object) -> None:
        """Set a key of a section of the pool file."""
        part = self.settings.setdefault(section, {})
        assert isinstance(part, dict)
        part[key] = value

    def note(self, text: str, *path: str) -> None:
        """Add a note on what could not be kept, or is to be checked."""
        self.notes.append((path, text))

    def protect(self, key: Variable) -> None:
        """Set the key of all replicas, and require it of clients too: without it anyone could use the replicas."""
        for replica in self.replicas:
            replica.api_key = key
        if "keys" not in self.settings:
            self.settings["keys"] = [{"name": "engines", "key": key}]
            self.note("clients need the engines' key: without keys anyone could use them through the gateway", "keys")

    def require_key(self, guard: str) -> None:
        """Require a key of clients, as a guard that cannot be kept has let in only some."""
        self.settings["keys"] = [{"name": "clients", "key": Variable.of("CLIENT_KEY")}]
        text = f"{guard} decided who may come in, which the gateway cannot ask: it does not start without CLIENT_KEY"
        self.note(f"{text}, and lets in who has that key; list the keys of your clients here", "keys")

    def set_policy(self, flag: str, value: str) -> None:
        """Set the policy that comes closest to a router's own; the default for one that is not known."""
        if value not in self.router.policies:
            self.note(
                f"{flag} {value}: not kept, so the policy is {self.policy}; known are {', '.join(self.router.policies)}"
            )
            return
        self.policy, *different = self.router.policies[value]
        self.policy_note = f"was {value}: {different[0]}" if different else ""

    def set_body_limit(self, mib: float) -> None:
        """Bound the bodies of requests, and all unfinished ones together by no less."""
        self.put("server", "max_body_mib", round(mib, 3))
        if mib > ServerSettings().max_unfinished_mib:
            self.put("server", "max_unfinished_mib", round(mib, 3))

    def set_ejection(self, eject_s: float) -> None:
        """Set the seconds of the first ejection, and of the longest to no less."""
        self.put("health", "eject_s", eject_s)
        if eject_s > HealthSettings().eject_max_s:
            self.put("health", "eject_max_s", eject_s)

    def add_static(self, flag: str, text: str, model: str | None) -> None:
        """Add a replica at an address."""
        url = url_of(text)
        if url is None:
            self.note(f"{flag} {text} is left out: expected an address such as http://10.0.0.1:8000")
        else:
            self.replicas.append(Replica(name_of(url), model, {"url": url}))

    def add_labelled(
        self, model: str | None, service: str | None, selector: str, port: float, namespace: str | None
    ) -> None:
        """Add a source of replicas that were found by labels, which the gateway finds by a service."""
        where: dict[str, Any] = {"service": service or Variable.of("VLLM_SERVICE")}
        where |= {"namespace": namespace} if namespace else {}
        source = Replica(service or "kubernetes", model, {"kubernetes": where | {"port": int(port)}})
        self.placeholders["VLLM_SERVICE"] = "service"
        source.notes.append(
            f"replicas were found by the labels {selector or '(any)'}: make a Service with them as its selector"
            + ("" if service else " and set VLLM_SERVICE to its name (or give --service)")
            + f"; {MAY_LIST}"
        )
        self.replicas.append(source)

    def pool(self) -> dict[str, Any]:
        """Return the pool file's data, and add a note for everything that is not as it was."""
        if not self.replicas:
            raise UsageError(
                "has no replica that the gateway can use" + "".join(f"\n  {text}" for _, text in self.notes)
            )
        if "keys" not in self.settings:
            self.note("there are no keys: anyone who reaches the gateway may use it (docs/security.md)")
        models: dict[str, Any] = {}
        owners: dict[str, str] = {}  # of addresses and aliases: the model
        for replica in self.replicas:
            if replica.model is None:
                raise UsageError("names no model: add --model NAME")
            self._add(replica, replica.model, models, owners)
        for name, model in models.items():
            if self.policy_note:
                self.note(self.policy_note, "models", name, "policy")
            if renamed := [alias for alias in model["aliases"] if alias in self._renamed(name)]:
                text = "requests keep their model's name: start the replicas with --served-model-name"
                self.note(" ".join([text, name, *renamed]), "models", name, "aliases")
            if not model["aliases"]:
                del model["aliases"]
        sections = {**self.settings, "models": models}
        return {name: sections[name] for name in _ORDER if name in sections}

    def _renamed(self, model: str) -> set[str]:
        return {name for replica in self.replicas if replica.model == model for name in replica.renamed}

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
        if not NAME.fullmatch(alias):
            self.note(f"{alias}: not kept; a name is made of letters, digits and . _ : / -", "models", owner)
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


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number, unused = 2, name
    while unused in taken:
        unused, number = f"{name}-{number}", number + 1
    return unused
