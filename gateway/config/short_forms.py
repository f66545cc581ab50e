"""Expands the short forms of a pool file into the form of its settings."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from backends.speculation import method_named


def written_out(pool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the unchecked data of a pool file in the form of its settings; leave what is not understood.

    Examples
    --------
    >>> written_out({"models": {"m": {"policy": "learned", "backends": {"a": {"method": "baseline"}}}}})
    {'models': {'m': {'policy': {'name': 'learned'}, 'backends': {'a': {'method': <Method.BASELINE: 'baseline'>}}}}}
    """
    models = pool.get("models")
    if not isinstance(models, Mapping):
        return dict(pool)
    return {**pool, "models": {name: _model(model) for name, model in models.items()}}


def name_of(text: str) -> str:
    """Return a valid backend name: for an address, its host and port.

    Examples
    --------
    >>> name_of("http://10.0.0.1:8000"), name_of("a b")
    ('10.0.0.1:8000', 'a-b')
    """
    return re.sub(r"[^A-Za-z0-9._:/-]+", "-", re.sub(r"^[a-z]+://", "", text)).strip("-") or "replica"


def _model(model: Any) -> Any:
    if not isinstance(model, Mapping):
        return model
    model = dict(model)
    if isinstance(model.get("policy"), str):
        model["policy"] = {"name": model["policy"]}
    elif model.get("policy") is None:
        model.pop("policy", None)
    backends = model.get("backends")
    if isinstance(backends, list):
        backends = _named(backends)
    if isinstance(backends, Mapping):
        model["backends"] = {name: _replica(each) for name, each in backends.items()}
    return model


def _named(backends: list[Any]) -> Any:
    """Return a list of replicas by name; the list itself if two have the same name."""
    named: dict[str, Any] = {}
    for each in backends:
        settings = {"url": each} if isinstance(each, str) else each
        if not isinstance(settings, Mapping):
            return backends
        own = {key: value for key, value in settings.items() if key != "name"}
        name = name_of(str(own.get("url") or ""))
        named[str(settings.get("name") or (f"{name}-{len(named) + 1}" if name in named else name))] = own
    return named if len(named) == len(backends) else backends


def _replica(replica: Any) -> Any:
    """Return the settings of a replica; its method defaults to that of its `speculative_config`, as in vLLM."""
    if isinstance(replica, str):
        replica = {"url": replica}
    if not isinstance(replica, Mapping):
        return replica
    config, method = replica.get("speculative_config"), replica.get("method")
    if isinstance(config, str):
        with contextlib.suppress(ValueError, RecursionError):  # validation reports what is no JSON
            config = json.loads(config)
    if isinstance(config, Mapping) and isinstance(named := config.get("method"), str):
        config = {**config, "method": named.lower()}
        method = method or named
    if method is None and not isinstance(config, Mapping):
        method = "baseline"
    if isinstance(method, str):
        method = method_named(method) or method
    said = {"speculative_config": config, "method": method}
    return {**replica, **{key: value for key, value in said.items() if value is not None}}
