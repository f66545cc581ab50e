"""What an operator may see and do: `/admin`, behind its own key."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import time
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from backends.backend import Backend, State
from gateway.http.errors import GatewayError
from gateway.routing.keys import ANONYMOUS, digest, presented_key
from gateway.routing.router import RoutingHeaders
from gateway.service.admin_policy import add_policy_routes
from gateway.service.assembly import Gateway
from gateway.service.worker_messages import WorkerMessages
from policies.policy import Assessment, Decision

log = logging.getLogger(__name__)


class Place(BaseModel):
    """Which replica an operator means."""

    model: str
    backend: str


def admin_router(gateway: Gateway, worker_messages: WorkerMessages) -> APIRouter:
    """Return the routes under `/admin`."""

    async def authorised(request: Request) -> None:
        presented = presented_key(dict(request.scope["headers"]))
        if not presented or not hmac.compare_digest(digest(presented), gateway.admin_digest):
            raise GatewayError(
                401,
                "/admin needs the admin key, as 'Authorization: Bearer KEY': it is admin.key of the pool file, "
                "or was printed at start.",
                code="invalid_admin_key",
            )

    router = APIRouter(prefix="/admin", dependencies=[Depends(authorised)], tags=["admin"])

    @router.get("/pool")
    async def pool() -> dict[str, Any]:
        """Describe every replica: what it is, how it is, what it does."""
        launched = worker_messages.launched
        return {
            "models": {
                name: {
                    "aliases": gateway.settings.models[name].aliases,
                    "policy": model.policy.name,
                    "qps": round(model.traffic.qps(time.monotonic()), 3),
                    "in_flight": model.traffic.in_flight,
                    "backends": {
                        one.name: _describe(gateway, one) | dict(launched.get(f"{name}/{one.name}", {}))
                        for one in gateway.pool.of(name)
                    },
                }
                for name, model in gateway.models.items()
            }
        }

    @router.get("/config")
    async def config() -> dict[str, Any]:
        """Return the settings in force, keys left out."""
        return gateway.settings.model_dump(mode="json")

    @router.post("/drain")
    async def drain(place: Place) -> dict[str, Any]:
        """Send a replica nothing more; what it works on may finish."""
        return _change(gateway, worker_messages, place, drained=True)

    @router.post("/resume")
    async def resume(place: Place) -> dict[str, Any]:
        """Let a drained replica back in."""
        return _change(gateway, worker_messages, place, drained=False)

    @router.post("/explain")
    async def explain(
        request: Request,
        path: Annotated[str, Query(description="The path it would be sent to")] = "/v1/chat/completions",
    ) -> dict[str, Any]:
        """Tell where a request would go and why, sending nothing; the body is the request's own."""
        return _explain(gateway, await request.body(), path, RoutingHeaders.read(dict(request.scope["headers"])))

    add_policy_routes(router, gateway)
    return router


def _describe(gateway: Gateway, backend: Backend) -> dict[str, Any]:
    engine = gateway.pool.engine(backend)
    load = backend.load
    return {
        "state": backend.state,
        "reason": backend.state_reason,
        "method": backend.method,
        "num_speculative_tokens": backend.num_speculative_tokens,
        "url": backend.url,
        "simulated": backend.simulated,
        "weight": backend.weight,
        "in_flight": backend.in_flight,
        "engine": None
        if engine is None
        else dataclasses.asdict(engine)
        | {
            "acceptance_rate": engine.acceptance_rate,
            "acceptance_length": engine.acceptance_length,
            "age_s": round(time.monotonic() - load.at_s, 3),
        },
    }


def _change(gateway: Gateway, worker_messages: WorkerMessages, place: Place, *, drained: bool) -> dict[str, Any]:
    backend = next((one for one in gateway.pool.of(place.model) if one.name == place.backend), None)
    if backend is None:
        there_are = ", ".join(f"{one.model}/{one.name}" for one in gateway.pool)
        raise GatewayError(404, f"There is no backend {place.model}/{place.backend}; there are: {there_are}.")
    gateway.pool.set_drained(backend, drained=drained)
    worker_messages.share_drain(backend.model, backend.name, drained=drained)
    return {"model": backend.model, "backend": backend.name, "state": backend.state, "in_flight": backend.in_flight}


def _told(choice: Decision) -> dict[str, Any]:
    """Return a decision without what the policy keeps of it for itself."""
    return {name: value for name, value in dataclasses.asdict(choice).items() if name != "memo"}


def _explain(gateway: Gateway, body: bytes, path: str, routing_headers: RoutingHeaders) -> dict[str, Any]:
    router = gateway.relay.router
    routed = router.route(path, "POST", body, ANONYMOUS, routing_headers, time.monotonic(), whole=True)
    members = gateway.pool.of(routed.model.name)
    problem: str | None = None
    eligible: list[Backend] = []
    try:
        eligible = router.candidates(routed, ANONYMOUS, routing_headers)
    except GatewayError as error:
        problem = error.message
    assessed: dict[str, Assessment] = {}
    choice: Decision | None = None
    if eligible:
        try:
            policy = routed.model.policy.dry_run_copy()  # choosing moves a turn on or draws a number; not for this
            assessed = {one.backend: one for one in policy.assess(routed.features, eligible)}
        except Exception as error:
            log.exception("policy %s cannot explain itself", routed.model.policy.name)
            raise GatewayError(500, f"The policy failed: {error!r}.", code="policy_failed") from error
        choice = router.choose(routed, eligible, routing_headers, policy)
    return {
        "features": orjson.loads(orjson.dumps(dataclasses.asdict(routed.features))),
        "candidates": [
            {
                "backend": one.name,
                "method": one.method,
                "state": one.state,
                "simulated": one.simulated,
                "in_flight": one.in_flight,
                "eligible": one.name in assessed,
                "score": assessed[one.name].score if one.name in assessed else None,
                "note": assessed[one.name].note
                if one.name in assessed
                else _why_not(one, routed.features.baseline_only),
            }
            for one in members
        ],
        "choice": None if choice is None else _told(choice),
        "problem": problem,
    }


def _why_not(backend: Backend, baseline_only: tuple[str, ...]) -> str:
    if backend.state is not State.UP:
        return f"{backend.state}: {backend.state_reason}" if backend.state_reason else backend.state.value
    if baseline_only:
        return f"a speculating vLLM does not serve {' and '.join(baseline_only)}"
    return "not what the request's own headers ask for"
