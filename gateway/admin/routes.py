"""The `/admin` endpoints. Their keys are checked before they are called: `gateway.routing.access`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from backends.backend import Backend
from backends.health import State
from gateway.admin.policy import add_policy_routes
from gateway.dialects.errors import GatewayError
from gateway.gateway import Gateway, Trial
from gateway.reload.reloader import ReloadError
from gateway.routing.access import RequestHeaders, read_head
from gateway.routing.keys import ANONYMOUS
from gateway.routing.routed_request import RoutedRequest
from policies.features.request import RequestFeatures
from policies.policy import Assessment, Decision
from policies.roles import assess, preview

log = logging.getLogger(__name__)


class BackendReference(BaseModel):
    """A replica, by model and name."""

    model: str
    backend: str


class TrialReference(BackendReference):
    """How a replica that the gateway starts should speculate for now: `{}` not at all, null as the pool file says."""

    speculative_config: dict[str, Any] | None


_RELOAD_ERRORS: dict[str, tuple[int, str]] = {
    "invalid": (400, "invalid_pool_file"),
    "refused": (409, "restart_needed"),
    "failed": (500, "reload_failed"),
}
_SHOWN = ("backend", "policy", "reason", "propensity", "cached_tokens", "cached_by")
"""Fields of a decision to show: all but the policy's private memo, and the candidates, which are shown separately."""
_NOT_SHOWN: Any = {
    "keys": {"__all__": {"key", "sha256"}},
    "admin": {"key", "sha256"},
    "models": {"__all__": {"backends": {"__all__": {"serve": {"env"}}}}},  # may hold tokens of model hubs
}


def admin_router(gateway: Gateway) -> APIRouter:
    """Return the router of `/admin`."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/pool")
    async def pool() -> dict[str, Any]:
        """Return the settings, state and load of every replica."""
        launched = await asyncio.to_thread(gateway.launched)
        return {
            "models": {
                name: {
                    "aliases": gateway.settings.models[name].aliases,
                    "policy": model.policy.name,
                    "qps": round(model.traffic.qps(time.monotonic()), 3),
                    "in_flight": model.traffic.in_flight,
                    "queue": None
                    if (queue := gateway.relay.queues.get(name)) is None
                    else {"waiting": queue.waiting, "waiting_bytes": queue.waiting_bytes},
                    "backends": {
                        backend.name: _describe(gateway, backend) | dict(launched.get(f"{name}/{backend.name}", {}))
                        for backend in gateway.pool.of(name)
                    },
                }
                for name, model in gateway.models.items()
            }
        }

    @router.get("/config")
    async def config() -> dict[str, Any]:
        """Return the active settings, without keys, their digests and the environment of engines."""
        return gateway.settings.model_dump(mode="json", exclude=_NOT_SHOWN)

    @router.post("/drain")
    async def drain(reference: BackendReference) -> dict[str, Any]:
        """Stop sending requests to a replica; those in flight finish."""
        return _set_drained(gateway, reference, drained=True)

    @router.post("/resume")
    async def resume(reference: BackendReference) -> dict[str, Any]:
        """Send requests to a drained replica again."""
        return _set_drained(gateway, reference, drained=False)

    @router.post("/reload")
    async def reload(
        dry_run: Annotated[bool, Query(description="Only check the pool file, and tell what would change")] = False,
    ) -> dict[str, Any]:
        """Reload the pool file, as a whole or not at all; requests in flight are not disturbed."""
        return {"dry_run": dry_run, "changes": await _reloaded(gateway, dry_run=dry_run)}

    @router.post("/try")
    async def try_(trial: TrialReference) -> dict[str, Any]:
        """Restart a replica's engine with another `speculative_config` than the pool file's; null ends the trial."""
        wanted = trial.model, trial.backend, trial.speculative_config
        return {"changes": await _reloaded(gateway, trial=wanted)}

    @router.post("/explain")
    async def explain(
        request: Request,
        path: Annotated[str, Query(description="Path of the request")] = "/v1/chat/completions",
    ) -> dict[str, Any]:
        """Return where a request would be sent and why, without sending it; the body is that of the request."""
        head = read_head("POST", ANONYMOUS, path, path.encode(), request.scope["headers"])
        return _explain(gateway, head, await request.body())

    add_policy_routes(router, gateway)
    return router


def _describe(gateway: Gateway, backend: Backend) -> dict[str, Any]:
    engine = backend.engine.metrics
    load = backend.load
    return {
        "state": backend.health.state,
        "reason": backend.health.reason,
        "method": backend.declared.method,
        "num_speculative_tokens": backend.declared.schedule.k,
        "speculative_config": backend.speculative_config,
        "contradictions": backend.engine.contradictions,
        "observed": {"method": backend.method, "num_speculative_tokens": backend.num_speculative_tokens},
        "tokens_per_step": _tokens_per_step(gateway, backend),
        "url": backend.url,
        "simulated": backend.simulated,
        "weight": backend.weight,
        "drafter_limit": backend.drafter_limit,
        "draft_depth": backend.draft_depth,
        "in_flight": backend.in_flight,
        "others": load.others,
        "engine": None
        if engine is None
        else dataclasses.asdict(engine)
        | {
            "acceptance": backend.engine.acceptance.at(time.monotonic()),  # over the last minute
            "age_s": round(time.monotonic() - load.at_s, 3),
        },
        "drafter_silent": _silence(gateway, backend),
    }


def _tokens_per_step(gateway: Gateway, backend: Backend) -> dict[str, Any] | None:
    """Return the comparison of answers and engine; None if there is nothing to compare yet."""
    figures = gateway.pool.watch(backend).tokens_per_step()
    if figures is None:
        return None
    return {name: round(value, 4) for name, value in figures.items()} | {"differs": backend.difference is not None}


def _silence(gateway: Gateway, backend: Backend) -> dict[str, Any] | None:
    """Return the silence of a backend's drafter, if it is silent."""
    detector = gateway.models[backend.model].detector
    silence = None if detector is None else detector.silent.get(backend.name)
    if silence is None:
        return None
    return {
        "cause": silence.cause,
        "since_s": round(silence.since_s, 3),
        "expected_tokens_per_step": round(silence.expected, 3),
        "tokens_per_step": round(silence.observed, 3),
    }


async def _reloaded(gateway: Gateway, *, dry_run: bool = False, trial: Trial | None = None) -> list[str]:
    if gateway.reload is None:
        raise GatewayError(409, "This gateway was not started with a pool file.", code="reload_failed")
    try:
        return await gateway.reload(dry_run=dry_run, trial=trial)
    except ReloadError as error:
        status, code = _RELOAD_ERRORS[error.outcome]
        raise GatewayError(status, f"Nothing was changed: {error.message}", code=code) from None


def _set_drained(gateway: Gateway, reference: BackendReference, *, drained: bool) -> dict[str, Any]:
    backend = next((member for member in gateway.pool.of(reference.model) if member.name == reference.backend), None)
    if backend is None:
        names = ", ".join(f"{member.model}/{member.name}" for member in gateway.pool)
        raise GatewayError(404, f"There is no backend {reference.model}/{reference.backend}; there are: {names}.")
    gateway.peers.set_drained(backend, drained=drained)
    return {
        "model": backend.model,
        "backend": backend.name,
        "state": backend.health.state,
        "in_flight": backend.in_flight,
        "others": backend.load.others,
    }


def _explain(gateway: Gateway, head: RequestHeaders, body: bytes) -> dict[str, Any]:
    router = gateway.relay.router
    for _ in router.check(body):
        pass
    routed = router.route(head, body, time.monotonic(), whole=True)
    members = gateway.pool.of(routed.model.name)
    policy = routed.model.policy
    problem: str | None = None
    eligible: list[Backend] = []
    try:
        eligible = router.candidates(routed)
    except GatewayError as error:
        problem = error.message
    assessed: dict[str, Assessment] = {}
    choice: Decision | None = None
    if eligible:
        try:
            assessed = {each.backend: each for each in assess(policy, routed.features, eligible)}
        except Exception as error:
            log.exception("policy %s failed to explain a request", policy.name)
            raise GatewayError(500, f"The policy failed: {error!r}.", code="policy_failed") from error
        choice = router.choose(routed, eligible, partial(preview, policy))
    return {
        "features": orjson.loads(orjson.dumps(dataclasses.asdict(routed.features))),
        "candidates": [
            {
                "backend": member.name,
                "method": member.declared.method,
                "state": member.health.state,
                "simulated": member.simulated,
                "in_flight": member.in_flight,
                "eligible": member.name in assessed,
                "score": assessed[member.name].score if member.name in assessed else None,
                "note": _note(assessed.get(member.name), member, routed),
            }
            for member in members
        ],
        "choice": None if choice is None else {name: getattr(choice, name) for name in _SHOWN},
        "is_compared": router.is_compared(routed),
        "problem": problem,
    }


def _note(assessed: Assessment | None, backend: Backend, routed: RoutedRequest) -> str:
    """Return the note on a backend: the policy's, its drafter's limit, and any trouble there."""
    risk = routed.model.troubles.risk(routed.features, backend)
    wrong = "" if risk is None else str(risk)
    if assessed is None:
        return wrong if wrong and backend.health.state is State.UP else _ineligible(backend, routed)
    return "; ".join(filter(None, (assessed.note, _beyond(backend, routed.features), wrong)))


def _beyond(backend: Backend, request: RequestFeatures) -> str:
    limit, tokens, most = backend.drafter_limit, request.prompt_tokens, backend.engine.said.context_tokens
    if 0 < most <= tokens and not request.is_unknown:
        return f"its context of {most:,} tokens is too short for a prompt of about {tokens:,}"
    if limit is None:
        return ""
    if request.unseen is None or not request.unseen.unknown:
        return limit.note_on(tokens, request.most_context_tokens - tokens)
    note = limit.note_on(request.unseen.text_tokens, request.most_context_tokens)
    return f"{note} (the tokens of its {' and '.join(request.unseen.unknown)} are not known yet)"


def _ineligible(backend: Backend, routed: RoutedRequest) -> str:
    """Return why a backend cannot serve a request."""
    if backend.health.state is not State.UP:
        return (
            f"{backend.health.state}: {backend.health.reason}" if backend.health.reason else backend.health.state.value
        )
    request, headers = routed.features, routed.headers
    if routed.home is not None and not (headers.backend or headers.method):
        return "the stored response is on another replica"
    if request.baseline_only:
        return f"a speculating vLLM does not support {' and '.join(request.baseline_only)}"
    if beyond := _beyond(backend, request):
        return beyond
    return "excluded by the headers of the request"
