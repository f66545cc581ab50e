"""LiteLLM's proxy: its config.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from backends.validation import UsageError
from gateway.config.pool_text import Variable
from gateway.config.short_forms import name_of
from gateway.importer.configuration import NAME, Configuration, Replica, Router, url_of
from gateway.importer.flags import section

_ENGINES = frozenset(
    {"openai", "text-completion-openai", "hosted_vllm", "custom_openai", "openai_like", "vllm", "litellm_proxy"}
)
"""Providers of LiteLLM that speak OpenAI's API to an address."""

_FROM_ENVIRONMENT = "os.environ/"
_NO_KEY = frozenset({"", "none", "null", "empty", "dummy", "fake", "fake-key", "no-key", "not-needed"})
_GUARDS = ("custom_auth", "enable_jwt_auth", "enable_oauth2_auth", "enable_oauth2_proxy_auth")
_READ = {"model", "api_base", "base_url", "api_key", "custom_llm_provider", "weight", "rpm", "tpm"}


def read(config: Mapping[str, Any]) -> Configuration:
    """Return what LiteLLM's proxy was configured with."""
    deployments = config.get("model_list")
    if not isinstance(deployments, list) or not deployments:
        raise UsageError("has no model_list: expected the config.yaml of LiteLLM's proxy")
    configuration = Configuration(Router.of("litellm"))
    configuration.put("server", "host", "0.0.0.0")
    configuration.put("server", "port", 4000)
    reader = _Deployments(configuration)
    for index, deployment in enumerate(deployments):
        params = deployment.get("litellm_params") if isinstance(deployment, Mapping) else None
        if not isinstance(params, Mapping) or not deployment.get("model_name"):
            configuration.note(f"model_list[{index}] is left out: expected model_name and litellm_params")
            continue
        reader.read(str(deployment["model_name"]), params)
    reader.set_weights()
    router = section(config, "router_settings")
    _router_settings(router, configuration)
    _general_settings(section(config, "general_settings"), configuration)
    timeout_s = router.get("timeout", section(config, "litellm_settings").get("request_timeout"))
    if isinstance(timeout_s, int | float):
        configuration.put("timeouts", "first_byte_s", timeout_s)
    _note_rest("litellm_settings", config, {"request_timeout"}, configuration)
    for name in config:
        if name not in {"model_list", "router_settings", "litellm_settings", "general_settings"}:
            configuration.note(configuration.router.not_kept(name))
    return configuration


class _Deployments:
    """Makes replicas of the deployments."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._shares: list[tuple[Replica, Mapping[str, Any]]] = []
        self._keys: dict[str, Variable] = {}

    def read(self, model_name: str, params: Mapping[str, Any]) -> None:
        engine, why_not = _engine_name(params)
        base = str(params.get("api_base") or params.get("base_url") or "")
        variable = _variable(base)
        url = variable or url_of(base)
        if engine and not base:
            why_not = "it has no api_base, so it is a hosted service"
        elif engine and url is None:
            why_not = "its api_base is no http://host:port or http://host:port/v1"
        if engine is None or url is None:
            self._configuration.note(f"a deployment of {model_name} is left out: {why_not}")
            return
        name = name_of(base.removeprefix(_FROM_ENVIRONMENT) if variable else url)
        replica = Replica(name, engine, {"url": url}, renamed=[model_name] if model_name != engine else [])
        if variable is not None:
            self._configuration.placeholders[variable[2:-1]] = f"http://replica-{len(self._shares)}:8000"
            replica.notes.append(f"the value of {url} must be an address without a path: not /v1")
        self._set_key(replica, params.get("api_key"))
        not_kept = self._configuration.router.not_kept
        replica.notes += [f"litellm_params.{not_kept(str(key))}" for key in params if key not in _READ]
        self._shares.append((replica, params))
        self._configuration.replicas.append(replica)

    def _set_key(self, replica: Replica, key: object) -> None:
        if (variable := _variable(key)) is not None:
            replica.api_key = variable
        elif isinstance(key, str) and key.lower() not in _NO_KEY:
            name = "API_KEY_" + re.sub(r"\W+", "_", replica.name, flags=re.ASCII).upper()
            replica.api_key = self._keys.setdefault(key, Variable.of(name))
            replica.notes.append(f"its key is not repeated here: set {replica.api_key} to it")

    def set_weights(self) -> None:
        """Weight the replicas of each model as `simple-shuffle` does: by `weight`, else by `rpm`, else by `tpm`."""
        for model in dict.fromkeys(replica.model for replica, _ in self._shares):
            group = [(replica, params) for replica, params in self._shares if replica.model == model]
            measure = next(
                (name for name in ("weight", "rpm", "tpm") if any(_positive(params.get(name)) for _, params in group)),
                None,
            )
            shares = [_positive(params.get(measure or "")) for _, params in group]
            least = min(filter(None, shares), default=None)
            for (replica, params), share in zip(group, shares, strict=True):
                if least and share and len(group) > 1:
                    replica.weight = round(share / least, 3)
                elif least and not share:
                    replica.notes.append(f"has no {measure}, so it got no requests; now its weight is 1")
                limits = [name for name in ("rpm", "tpm") if params.get(name) is not None]
                if limits:
                    kept = "its share is kept as weight, and " if measure in limits and len(group) > 1 else ""
                    replica.notes.append(f"{' and '.join(limits)}: {kept}limits belong to keys, not to replicas")


def _engine_name(params: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the name under which the engine serves, and why the gateway cannot use it."""
    text = str(params.get("model", ""))
    provider = str(params.get("custom_llm_provider") or "")
    if not provider:
        provider, _, text = text.partition("/")
    else:
        text = text.removeprefix(f"{provider}/")
    if provider not in _ENGINES:
        return None, f"{provider or 'no model'} is no provider with OpenAI's API at an address"
    if not NAME.fullmatch(text) or text.startswith(_FROM_ENVIRONMENT):
        return None, "its litellm_params.model is no single model"
    return text, ""


def _router_settings(settings: Mapping[str, Any], configuration: Configuration) -> None:
    strategy = str(settings.get("routing_strategy") or "simple-shuffle")
    configuration.set_policy("router_settings.routing_strategy", strategy)
    if (cooldown_s := _positive(settings.get("cooldown_time"))) is not None:
        configuration.set_ejection(cooldown_s)
    aliases = settings.get("model_group_alias")
    for alias, target in aliases.items() if isinstance(aliases, Mapping) else ():
        name = str(target.get("model") if isinstance(target, Mapping) else target)
        owners = [replica for replica in configuration.replicas if name in (replica.model, *replica.renamed)]
        for replica in owners[:1]:
            replica.renamed.append(str(alias))
        if not owners:
            configuration.note(f"router_settings.model_group_alias.{alias}: not kept; its model is not in the pool")
    read = {"routing_strategy", "cooldown_time", "model_group_alias", "timeout"}
    _note_rest("router_settings", {"router_settings": settings}, read, configuration)


def _general_settings(settings: Mapping[str, Any], configuration: Configuration) -> None:
    key = settings.get("master_key")
    if key:
        name = _variable(key) or Variable.of("LITELLM_MASTER_KEY")
        if _variable(key) is None:
            configuration.note("the key is not repeated here: set LITELLM_MASTER_KEY to master_key", "keys")
        configuration.settings["keys"] = [{"name": "master", "key": name, "may_override": True, "admin": "write"}]
        configuration.note("keys that LiteLLM made itself are in its database: list them here too", "keys")
    elif guards := [name for name in _GUARDS if settings.get(name)]:
        configuration.require_key(f"general_settings.{guards[0]}")
    if (limit := _positive(settings.get("global_max_parallel_requests"))) is not None:
        configuration.put("server", "max_in_flight", limit)
    if (mib := _positive(settings.get("max_request_size_mb"))) is not None:
        configuration.set_body_limit(mib)
    read = {"master_key", "global_max_parallel_requests", "max_request_size_mb"}
    _note_rest("general_settings", {"general_settings": settings}, read, configuration)


def _note_rest(name: str, config: Mapping[str, Any], read: set[str], configuration: Configuration) -> None:
    for key in section(config, name):
        if key not in read:
            configuration.note(f"{name}.{configuration.router.not_kept(str(key))}")


def _variable(value: object) -> Variable | None:
    """Return the reference to the variable that a value names; None for any other value."""
    if isinstance(value, str) and value.startswith(_FROM_ENVIRONMENT):
        return Variable.of(value.removeprefix(_FROM_ENVIRONMENT))
    return None


def _positive(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
