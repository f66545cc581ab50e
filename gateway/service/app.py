"""The gateway's own endpoints, served by FastAPI; all other paths are relayed without it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from backends import background
from gateway import __version__
from gateway.admin.routes import admin_router
from gateway.dialects.errors import GatewayError, gateway_failed, nothing_here
from gateway.gateway import Gateway
from gateway.http.headers import headers_of
from gateway.http.paths import canonical_path, is_admin
from gateway.relay.frontend import Current, access_of
from gateway.reload.series import BesideSeries
from gateway.routing.gauges import refresh_backends, refresh_policy
from gateway.routing.keys import Client
from gateway.service.default_temperature import follow_temperature, known_temperature
from policies.roles import Maintained, Work

_TICK_S = 0.5
_FIRST_PROBE_TIMEOUT_S = 1.0
_MAX_CPU_SHARE = 0.02
"""Largest share of a core for fitting a policy; longer fits run less often."""
_MAX_PAUSE_S = 30.0
_YIELD_S = 0.002


class OwnPaths:
    """The ASGI application of a gateway process at one of its addresses: it answers own paths, and relays nothing.

    `gateway.routing.access` has admitted its requests before their bodies were read.
    """

    def __init__(self, app: FastAPI, current: Current, *, is_admin: bool = False) -> None:
        self._app = app
        self._current = current
        self._is_admin = is_admin  # whether it serves the admin address, not the clients'

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        access, headers = access_of(self._current, is_admin=self._is_admin), dict(scope["headers"])
        path = scope["path"] = canonical_path(scope["raw_path"])
        if access.cors is not None and access.is_preflight(scope["method"], path, headers):
            await send({"type": "http.response.start", "status": 204, "headers": access.cors.preflight(headers)})
            await send({"type": "http.response.body"})
            return
        lines = b"" if is_admin(path) else access.lines_for(headers)

        async def send_with_lines(message: Message) -> None:
            if lines and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers_of(lines)]
            await send(message)

        await self._app(scope, receive, send_with_lines)


def create_app(gateway: Gateway) -> FastAPI:
    """Return the FastAPI application: health, metrics, models and `/admin`."""
    count_failure = BesideSeries(gateway.metrics, gateway.rooms).count_failure

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await _start(gateway, count_failure)
        tasks = _Tasks(gateway)
        gateway.on_change.append(tasks.follow)
        try:
            yield
        finally:
            gateway.on_change.remove(tasks.follow)
            await tasks.stop()
            await _stop(gateway, count_failure)

    app = FastAPI(
        title="Speculation gateway",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/admin/openapi.json",
        redirect_slashes=False,
    )
    app.include_router(admin_router(gateway))
    for room in gateway.rooms:
        room.add_routes(app)

    _answer_errors(app)

    @app.get("/health")
    async def health() -> Response:
        """Answer 200 while the process runs."""
        return Response()

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        """Answer 200 if every model has a backend that is up, else 503; with a key, name these backends."""
        up = {name: [backend.name for backend in gateway.pool.up(name)] for name in gateway.models}
        ready = gateway.is_ready()
        shown: dict[str, Any] = {"ready": ready}
        with contextlib.suppress(GatewayError):  # without a key, no names are shown
            client = _client(gateway, request)
            shown["up"] = {name: names for name, names in up.items() if client.may_use(name)}
        return JSONResponse(shown, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in the text format of Prometheus."""
        refresh(gateway)
        # Takes 15 ms for 200 series, too long for the event loop.
        page = await asyncio.to_thread(gateway.metrics.page)
        return Response(page, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """List the models in OpenAI's format."""
        return {"object": "list", "data": _cards(gateway, request)}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        """Return one model."""
        cards = _cards(gateway, request)
        card = next((card for card in cards if card["id"] == name), None)
        if card is None:
            names = ", ".join(card["id"] for card in cards)
            there_are = f"there are: {names}" if names else "this key may use none"
            raise GatewayError(404, f"The model `{name}` does not exist here; {there_are}.", code="model_not_found")
        return card

    return app


def _answer_errors(app: FastAPI) -> None:
    """Answer all errors in OpenAI's format, including FastAPI's."""

    @app.exception_handler(GatewayError)
    async def answer(_: Request, error: GatewayError) -> Response:
        headers = {name.decode(): value.decode() for name, value in error.headers()}
        return Response(error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        known = nothing_here()
        if error.status_code != known.status:
            text = f"{request.method} {request.url.path}: {error.detail}."
            known = GatewayError(error.status_code, text, code="invalid_request")
        answered = await answer(request, known)
        answered.headers.update(error.headers or {})
        return answered

    @app.exception_handler(RequestValidationError)
    async def answer_invalid(request: Request, error: RequestValidationError) -> Response:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"][1:]))
        text = f"{where or wrong['loc'][0]}: {wrong['msg']}."
        if wrong["type"] == "json_invalid":
            where, text = "", f"body: no JSON, from character {wrong['loc'][1]} on."
        elif not where and "json" not in request.headers.get("content-type", ""):  # the body was not even parsed
            text = "body: expected JSON, with the header 'Content-Type: application/json'."
        return await answer(request, GatewayError(422, text, code="invalid_request", param=where or None))

    @app.exception_handler(Exception)  # which is logged
    async def answer_defect(request: Request, _: Exception) -> Response:
        return await answer(request, gateway_failed())


def _cards(gateway: Gateway, request: Request) -> list[dict[str, Any]]:
    client = _client(gateway, request)
    cards = []
    for name, settings in gateway.settings.models.items():
        members = gateway.pool.of(name)
        adapters = {
            adapter
            for backend in members
            for adapter in backend.engine.said.adapters
            if client.may_adapt(name, adapter)
        }
        own = {"object": "model", "created": int(time.time()), "owned_by": "vllm", "root": name, "parent": name}
        cards += [own | {"id": adapter} for adapter in sorted(adapters - {*gateway.settings.models, *settings.aliases})]
        if not client.may_use(name):
            continue
        said = (backend.engine.said for backend in gateway.pool.up(name) or members)
        engine_cards = {each.context_tokens: each.card for each in said if each.card is not None}
        engine_card = engine_cards[max(engine_cards)] if engine_cards else {}
        simulated = bool(members) and all(backend.simulated for backend in members)
        for alias in (name, *settings.aliases):
            card = own | {"parent": None, **engine_card, "id": alias}
            cards.append(card | {"simulated": True} if simulated else card)
    return cards


def _client(gateway: Gateway, request: Request) -> Client:
    return gateway.relay.access.identify(request.method, dict(request.scope["headers"]))


class _Tasks:
    """The periodic tasks of a gateway process and of its models."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tick = background.keep_running("tick", partial(_tick, gateway))
        self._of_models: dict[object, asyncio.Task[None]] = {}
        self.follow()

    def follow(self) -> None:
        """Start the tasks of new models and policies, and end those of removed ones."""
        wanted: dict[object, Callable[[], asyncio.Task[None]]] = {}
        for name, model in self._gateway.models.items():
            if model.maintained is not None:
                failed = partial(model.fallback.note, model.policy.name, "maintenance")
                learn = partial(_learn, model.maintained, failed)
                wanted[id(model.policy)] = partial(background.keep_running, "policies", learn, of=name)
            if known_temperature(self._gateway.settings.models[name]) is None:
                follow = partial(follow_temperature, self._gateway, name)
                wanted[name] = partial(background.keep_running, "default temperature", follow, of=name)
        for key in self._of_models.keys() - wanted.keys():
            self._of_models.pop(key).cancel()
        for key in wanted.keys() - self._of_models.keys():
            self._of_models[key] = wanted[key]()

    async def stop(self) -> None:
        """End all tasks."""
        tasks = [self._tick, *self._of_models.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start(gateway: Gateway, count_failure: Callable[[str], None]) -> None:
    """Start everything that the first request needs."""
    background.on_failure.append(count_failure)
    for room in gateway.rooms:
        room.start()
    await gateway.state.start()
    for exchange in gateway.peer_exchanges:
        exchange.start()
    await gateway.pool.start()
    await gateway.pool.wait_until_probed(_FIRST_PROBE_TIMEOUT_S)


async def _stop(gateway: Gateway, count_failure: Callable[[str], None]) -> None:
    """Stop everything that `_start` started, and close what requests opened."""
    for room in gateway.rooms:
        with background.guarded("tick", of=type(room).__name__):
            await room.stop()
    for exchange in gateway.peer_exchanges:
        await exchange.stop()
    await gateway.state.stop()
    gateway.metrics.flush()  # other workers still report this worker's counts
    await gateway.pool.stop()
    for model in gateway.models.values():
        for upstream in model.upstreams.values():
            upstream.client.close()
    background.on_failure.remove(count_failure)


async def _tick(gateway: Gateway) -> None:
    """Run the periodic tasks every half second; after a delay, only once waiting input has been read."""
    while True:
        due_s = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        if time.monotonic() - due_s > _TICK_S:
            await asyncio.sleep(_TICK_S)
        with background.guarded("tick", of="requests"):
            gateway.relay.sweep()
        for has_ended in [*gateway.leaving]:
            with background.guarded("tick", of="what has left"):
                if has_ended():
                    gateway.leaving.remove(has_ended)
        refresh(gateway)


async def _learn(policy: Maintained, failed: Callable[[Exception], None]) -> None:
    """Run a policy's maintenance periodically in a thread; after a failure, the previous fit stays in use.

    With more observations, a fit takes longer and changes less, so the pauses grow with its cost.
    """
    pause_s = _TICK_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            if (work := policy.maintenance()) is not None:
                cpu_s = await asyncio.to_thread(_cpu_s, work)
                pause_s = max(_TICK_S, min(_MAX_PAUSE_S, cpu_s / _MAX_CPU_SHARE))
        except Exception as error:  # noqa: BLE001 -- plugins may raise anything; retried after the pause
            failed(error)


def _cpu_s(work: Work) -> float:
    """Run `work`, yielding to the event loop; return the CPU seconds that this thread used."""
    began_s = time.thread_time()
    work(_yield_to_event_loop)
    return time.thread_time() - began_s


def _yield_to_event_loop() -> None:
    time.sleep(_YIELD_S)  # releases the interpreter lock


def refresh(gateway: Gateway) -> None:
    """Run the periodic work of the rooms, and update the series; a failure leaves a series unchanged."""
    for room in gateway.rooms:
        with background.guarded("tick", of=type(room).__name__):
            room.tick()
    with background.guarded("tick", of="metrics"):
        for queue in gateway.relay.queues.values():
            gateway.relay.metrics.refresh_queue(queue.model, queue.waiting, queue.refused)
        refresh_backends(gateway.metrics, gateway.pool)
    for name, model in gateway.models.items():
        with background.guarded("tick", of="metrics"):
            model.fallback.count(gateway.metrics, name)
            refresh_policy(gateway.metrics, model, gateway.pool.of(name))
    gateway.metrics.flush()
