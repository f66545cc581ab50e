"""Request bodies: any bytes are either refused with a 4xx or routed with features that every policy can use.

The first byte chooses the path, whether all features are computed, and whether the rest is the body or describes it
(`tests.fuzz.documents`).
"""

from __future__ import annotations

import math
from dataclasses import fields

from backends.backend import Backend
from backends.health import Health, HealthRules, State
from backends.pool import Pool
from backends.speculation import Method
from gateway.dialects.errors import GatewayError
from gateway.routing.access import read_head
from gateway.routing.keys import ANONYMOUS
from gateway.routing.model import Model
from gateway.routing.router import Router
from policies.features.request import RequestFeatures
from policies.policy import policies
from tests.fuzz.documents import document

_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/tokenize",
    "/v1/responses/resp_1/cancel",
    "/v1/messages/count_tokens",
)
_POLICIES = ("thresholds", "least_loaded", "learned")
_SHARES = ("overlap", "code_share")
_COUNTS = ("n", "prompt_tokens", "turns")


def _backends() -> list[Backend]:
    methods = (Method.BASELINE, Method.NGRAM, Method.EAGLE3)
    backends = [Backend(method.value, "m", method, f"http://127.0.0.1:{1 + at}") for at, method in enumerate(methods)]
    for backend in backends:
        backend.health = Health(State.UP)
    return backends


def _model(name: str) -> Model:
    kind = policies()[name]
    return Model("m", kind(kind.Settings()), 1.0, {backend.name: None for backend in _BACKENDS})


_BACKENDS = _backends()
_MODELS = [_model(name) for name in _POLICIES]
_ROUTERS = [Router({"m": model}, Pool(_BACKENDS, HealthRules()), 1_500_000) for model in _MODELS]


def fuzz_one(data: bytes) -> None:
    """Route a request."""
    flags, body = (data[0], data[1:]) if data else (0, b"")
    if flags & 16:
        body = document(body)
    path, whole = _PATHS[flags & 7], bool(flags & 8)
    for router, model in zip(_ROUTERS, _MODELS, strict=True):
        try:
            routed = router.route(read_head("POST", ANONYMOUS, path, path.encode(), []), body, 1.0, whole=whole)
        except GatewayError as error:
            _check_error(error)
            continue
        _check(routed.features)
        assert model.policy.choose(routed.features, router.candidates(routed)).backend in model.upstreams


def _check_error(error: GatewayError) -> None:
    assert 400 <= error.status < 500
    assert len(str(error)) < 4096


def _check(features: RequestFeatures) -> None:
    for field in fields(features):
        value = getattr(features, field.name)
        assert not isinstance(value, float) or math.isfinite(value), field.name
    assert features.temperature >= 0
    for name in _SHARES:
        assert 0 <= getattr(features, name) <= 1, name
    for name in _COUNTS:
        assert getattr(features, name) >= 0, name
    assert features.max_tokens is None or features.max_tokens >= 0
    hash(features)
