"""The application: FastAPI for what the gateway answers itself, the relay for everything else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from gateway import __version__
from gateway.frontend.asgi import AsgiFrontend, Receive, Scope, Send
from gateway.http.errors import GatewayError
from gateway.http.paths import is_own
from gateway.routing.model import Model
from gateway.service.admin import admin_router
from gateway.service.assembly import Gateway
from gateway.service.worker_messages import WorkerMessages
from policies.policy import Work

log = logging.getLogger(__name__)

_SWEEP_S = 0.5
_FIRST_LOOK_S = 1.0
_LEARN_SHARE = 0.02
"""Most of a core that fitting may take, once it takes more than that of half a second."""
_LONGEST_PAUSE_S = 30.0
_LET_OTHERS_S = 0.002


class Application:
    """The ASGI application of a gateway process.

    The relay's paths never enter FastAPI: a route there costs several times the hop itself.
    """

    def __init__(self, gateway: Gateway, worker_messages: WorkerMessages) -> None:
        self._own = create_app(gateway, worker_messages)
        self._relay = AsgiFrontend(gateway.relay, max_body_bytes(gateway))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or take part in the server's lifespan."""
        if scope["type"] == "http" and not is_own(scope["path"]):
            await self._relay(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003, "reason": "the gateway relays HTTP only"})
        else:
            await self._own(scope, receive, send)


def max_body_bytes(gateway: Gateway) -> int:
    """Return the largest request body that is taken."""
    return int(gateway.settings.server.max_body_mib * 2**20)


def create_app(gateway: Gateway, worker_messages: WorkerMessages) -> FastAPI:
    """Return the FastAPI application: health, metrics, models and `/admin`."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        recorder = gateway.relay.recorder
        await _start(gateway)
        beside = [asyncio.create_task(_tick(gateway, worker_messages))]
        beside += [asyncio.create_task(_learn(model)) for model in gateway.models.values()]
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            for model in gateway.models.values():
                if model.shadow is not None:
                    await asyncio.to_thread(model.shadow.stop)
            if recorder is not None:
                await asyncio.to_thread(recorder.stop)
                recorder.count(gateway.metrics)
            await gateway.state.stop()
            gateway.metrics.flush()  # siblings go on answering for what this worker counted
            await gateway.pool.stop()
            for model in gateway.models.values():
                for upstream in model.upstreams.values():
                    upstream.client.close()

    app = FastAPI(
        title="Speculation gateway",
        version=__version__,
        lifespan=lifespan,
        docs_url="/admin/docs",
        redoc_url=None,
        openapi_url="/admin/openapi.json",
    )
    app.include_router(admin_router(gateway, worker_messages))

    @app.exception_handler(GatewayError)
    async def answer_error(request: Request, error: GatewayError) -> Response:
        headers = {name.decode(): value.decode() for name, value in error.headers()}
        return Response(error.body(), error.status, headers)

    @app.get("/health")
    async def health() -> Response:
        """Say that the process lives."""
        return Response()

    @app.get("/readyz")
    async def readyz() -> Response:
        """Say whether every model has a backend that is up: 200 if so, 503 if not."""
        up = {name: [one.name for one in gateway.pool.up(name)] for name in gateway.models}
        ready = all(up.values())
        return JSONResponse({"ready": ready, "up": up}, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Write the page for Prometheus."""
        _refresh(gateway)
        page = await asyncio.to_thread(gateway.metrics.render)  # 15 ms for 200 series: not on the loop
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """List the models, as OpenAI and vLLM do."""
        return {"object": "list", "data": _cards(gateway, request)}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        """Describe one model."""
        cards = _cards(gateway, request)
        card = next((card for card in cards if card["id"] == name), None)
        if card is None:
            names = ", ".join(card["id"] for card in cards)
            raise GatewayError(
                404, f"The model `{name}` does not exist here; there are: {names}.", code="model_not_found"
            )
        return card

    return app


def _cards(gateway: Gateway, request: Request) -> list[dict[str, Any]]:
    client = gateway.relay.identify(request.method, dict(request.scope["headers"]))
    cards = []
    for name, settings in gateway.settings.models.items():
        if client.models is not None and name not in client.models:
            continue
        known = gateway.pool.model_card(name) or {}
        simulated = all(one.simulated for one in gateway.pool.of(name))
        for alias in (name, *settings.aliases):
            card = {"object": "model", "created": int(time.time()), "owned_by": "vllm", "root": name, "parent": None}
            card |= known | {"id": alias}
            cards.append(card | {"simulated": True} if simulated else card)
    return cards


async def _start(gateway: Gateway) -> None:
    """Make everything ready for the first request."""
    if gateway.relay.recorder is not None:
        gateway.relay.recorder.start()
    await gateway.state.start()  # so that it meets what was learned
    await gateway.pool.start()
    for model in gateway.models.values():
        if model.shadow is not None:
            model.shadow.start()  # its process makes itself ready meanwhile
        await asyncio.to_thread(model.policy.warm_up)
    await gateway.pool.looked_at(_FIRST_LOOK_S)


async def _tick(gateway: Gateway, worker_messages: WorkerMessages) -> None:
    """Do what is due every half second beside the requests."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        gateway.relay.sweep()
        worker_messages.share_limits(gateway.relay.limits)
        for model in gateway.models.values():
            if model.shadow is not None:
                model.shadow.deliver(model.fallback)
        _refresh(gateway)


async def _learn(model: Model) -> None:
    """Have a policy fit what it observed, in a thread; a fit that fails leaves what was learned before.

    The more there is to fit the longer it takes, and the less one more request changes: so it is done less often.
    """
    pause_s = _SWEEP_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            if (work := model.policy.maintenance()) is not None:
                cpu_s = await asyncio.to_thread(_cpu_s, work)
                pause_s = max(_SWEEP_S, min(_LONGEST_PAUSE_S, cpu_s / _LEARN_SHARE))
        except Exception as error:  # noqa: BLE001 -- it goes on with what it knew, and tries again
            model.fallback.note(model.policy.name, "maintenance", error)


def _cpu_s(work: Work) -> float:
    """Do something a little at a time, and return the seconds of a core that it took this thread."""
    began_s = time.thread_time()
    work(_let_others)
    return time.thread_time() - began_s


def _let_others() -> None:
    time.sleep(_LET_OTHERS_S)  # the event loop has the interpreter meanwhile, and does what has come


def _refresh(gateway: Gateway) -> None:
    if gateway.relay.recorder is not None:
        gateway.relay.recorder.count(gateway.metrics)
    gateway.metrics.refresh((one, gateway.pool.engine(one)) for one in gateway.pool)
    for name, model in gateway.models.items():
        model.fallback.count(gateway.metrics, name)
        if model.shadow is not None:
            model.shadow.count(gateway.metrics, name)
    for name, policy_versions in gateway.pinnings.items():
        guardrail, out = policy_versions.policy.guardrail, policy_versions.policy.outlier_ejection.reasons
        quarantined = {one.name: one.name in out for one in gateway.pool.of(name)}
        gateway.metrics.refresh_policy(name, guardrail.frozen, guardrail.ratio, quarantined)
