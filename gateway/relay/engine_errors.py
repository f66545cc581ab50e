"""Decides whether an engine's error is for the client, or its backend has failed the request."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from backends.backend import Backend
from backends.http.receiver import HeaderList
from backends.pool import Pool
from gateway.dialects.ending import BUSY
from gateway.http.headers import relative_location
from gateway.relay.failures import Failure, Step
from gateway.routing.contexts import refusal_of
from policies.features.request import Endpoint

_READ_BYTES: Final = 2048  # of an error
UNAUTHORIZED: Final = 401
_NOT_FOUND: Final = 404
REFUSALS: Final = frozenset({400, 422})
OVERLOADED: Final = 503
"""No evidence against an engine that is at work, unless most of the other replicas are up."""
RETRYABLE: Final = frozenset({BUSY, 500, 502, OVERLOADED})  # not 504: there a proxy says that the engine is slow
TOLD_IN_BODY: Final = RETRYABLE | REFUSALS | {_NOT_FOUND}
"""Errors whose meaning depends on their body."""
_FULL: Final = re.compile(rb"busy|overload|queue|capacity|too many|rate.?limit", re.IGNORECASE)
"""Words by which a 503 says that the engine is full; vLLM: `currently busy and cannot accept new requests`."""


def failure_of(
    status: int, body: bytes, backend: Backend, pool: Pool, endpoint: Endpoint, *, knows_key: bool
) -> Failure | None:
    """Return the failure that an engine's error stands for; None if the error is for the client.

    Parameters
    ----------
    knows_key
        Whether the engine was sent the client's own key.
    """
    if status in RETRYABLE:
        return _failure_to_serve(status, body, backend, pool)
    if status == UNAUTHORIZED:
        if knows_key:
            return Failure("key", otherwise=Step.ENGINE_ERROR)
        return Failure("key", "refuses the key that the gateway sends it")
    if status == _NOT_FOUND:
        if endpoint is Endpoint.OTHER or b"model" not in body.lower():
            return None
        if b"`%b`" % backend.model.encode() in body:  # vLLM lists the names that it serves without these quotes
            return Failure("model", "does not serve its model any more")
        return Failure("model", otherwise=Step.ENGINE_ERROR)  # an alias or adapter that no engine may serve
    if status in REFUSALS:
        tokens, _ = refusal_of(body)
        if tokens:
            _learn_context(backend, pool, tokens)
            return Failure("length")
    return None


def _failure_to_serve(status: int, body: bytes, backend: Backend, pool: Pool) -> Failure:
    watch = pool.watch(backend)
    has_work = backend.engine.metrics is None or watch.is_at_work or backend.in_flight > 1
    if status == BUSY or (status == OVERLOADED and has_work and _FULL.search(body, 0, _READ_BYTES)):
        return Failure("busy")
    others_up = sum(other is not backend for other in pool.up(backend.model))
    can_spare = 2 * others_up > len(pool.of(backend.model))
    is_evidence = status != OVERLOADED or not watch.is_at_work or can_spare
    return Failure("status", f"answered {status} to a request that another served" if is_evidence else "")


def _learn_context(backend: Backend, pool: Pool, tokens: int) -> None:
    said = backend.engine.said
    if not said.context_tokens:
        backend.set_engine(replace(said, context_tokens=tokens))
        pool.unlike.compare(pool.of(backend.model))


def redirects_elsewhere(status: int, headers: HeaderList, authority: bytes) -> bool:
    """Return whether an answer redirects to another server than the one at `authority`."""
    if not 300 <= status < 400:
        return False
    locations = [value for name, value in headers if name == b"location"]
    return any(relative_location(location, authority) is None for location in locations)
