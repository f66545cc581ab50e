"""A gateway in front of scripted upstreams, all on real sockets of this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from backends.backend import Backend
from backends.drafter_limit import DrafterLimit
from backends.health import State
from benchmarks.metrics_page import total
from gateway.cli.app import app
from gateway.config.pool_file import PoolFile
from gateway.gateway import Gateway
from gateway.listening.listener import listen
from gateway.routing.keys import digest
from gateway.service.assembly import assemble
from gateway.service.replicas import configured
from gateway.service.server import Server
from tests.support.upstream import Behaviour, Upstream, well
from tests.support.waiting import TIMEOUT_S, eventually

ADMIN_KEY = "the-admin-key"
MODEL = "m"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


ADMIN = bearer(ADMIN_KEY)


@dataclass
class Running:
    """A running gateway, its upstreams, and a client for it."""

    gateway: Gateway
    server: Server
    upstreams: dict[str, Upstream]
    url: str
    client: httpx.AsyncClient

    def backend(self, name: str) -> Backend:
        return next(backend for backend in self.gateway.pool if backend.name == name)

    async def until(self, condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        await eventually(condition, timeout_s)

    async def until_up(self, *names: str) -> None:
        await self.until(lambda: all(self.backend(name).health.state is State.UP for name in names or self.upstreams))

    async def until_read(self) -> None:
        """Wait until the gateway has read all that its clients have written: it answers a later request."""
        (await self.client.get("/health")).raise_for_status()

    async def counted(self, series: str, **labels: str) -> float:
        """Return the sum of the samples of a series that have some labels, on the page of the metrics."""
        return total((await self.client.get("/metrics")).text, series, **labels)

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def admin(self, path: str) -> Any:
        """Return what a path below `/admin` answers."""
        return (await self.client.get(f"/admin/{path}", headers=ADMIN)).json()

    async def on_page(self) -> dict[str, Any]:
        """Return what the dashboard shows of each replica."""
        return {each["name"]: each for each in (await self.admin("dashboard/snapshot"))["models"][0]["backends"]}

    async def explain(self, text: str = "hi", **fields: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        return (await self.client.post("/admin/explain", json=body, headers=ADMIN)).json()

    async def notes(self, text: str = "hi", **fields: Any) -> dict[str, str]:
        """Return what an explanation says of each replica."""
        return {each["backend"]: each["note"] for each in (await self.explain(text, **fields))["candidates"]}

    async def command(self, *line: str, key: str = ADMIN_KEY, url: str = "") -> Result:
        """Run `gateway` with this gateway as its target."""
        words = [*line, "--url", url or self.url, "--admin-key", key]
        return await asyncio.to_thread(CliRunner().invoke, app, words)


Start = Callable[..., "contextlib.AbstractAsyncContextManager[Running]"]

FAST = {
    "timeouts": {"connect_s": 5.0, "first_byte_s": 1.5, "idle_s": 1.0},
    "health": {"interval_s": 0.2, "timeout_s": 5.0, "eject_s": 0.3, "eject_max_s": 2.0, "slow_start_s": 0.2},
    "server": {"drain_s": 2.0},
}


@contextlib.asynccontextmanager
async def start_gateway(
    methods: dict[str, str] | None = None,
    policy: dict[str, Any] | None = None,
    *,
    default_temperature: float | None = 1.0,
    behaviour: Behaviour = well,
    rescue: bool | None = None,
    ask_usage: bool = True,
    queue: dict[str, Any] | None = None,
    compare: dict[str, Any] | None = None,
    port: int = 0,
    limits: Mapping[str, DrafterLimit] | None = None,
    kv_events: Mapping[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Start upstreams (name -> method) and a gateway in front of them.

    Without a default temperature the gateway sends a request of its own to the upstreams.
    """
    methods = methods or {"a": "baseline", "b": "ngram"}
    async with contextlib.AsyncExitStack() as stack:
        upstreams = {name: await stack.enter_async_context(Upstream(name, MODEL, behaviour)) for name in methods}
        configs = {
            "ngram": {"num_speculative_tokens": 5, "prompt_lookup_max": 4},
            "eagle3": {"num_speculative_tokens": 3},
        }
        backends = {
            name: {
                "method": method,
                "url": upstreams[name].url,
                "kv_events": (kv_events or {}).get(name),
                "speculative_config": configs.get(method),
                "drafter_limit": asdict(limits[name]) if limits and name in limits else None,
            }
            for name, method in methods.items()
        }
        given = {"default_temperature": default_temperature, "rescue": rescue, "queue": queue, "compare": compare}
        model = {name: value for name, value in given.items() if value is not None}
        model |= {"policy": policy or {"name": "round_robin"}, "backends": backends, "ask_usage": ask_usage}
        pool = PoolFile.model_validate({**FAST, "models": {MODEL: model}, **settings})
        own = PoolFile.model_validate({"models": {MODEL: model}})  # the settings of a test may have others
        gateway = assemble(pool, configured(own), digest(ADMIN_KEY))
        listener = stack.enter_context(listen("127.0.0.1", port, shared=False))
        server = Server(gateway)
        serving = asyncio.create_task(server.serve_at(listener))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20.0, trust_env=False))
            running = Running(gateway, server, upstreams, url, client)
            await running.until(lambda: server.started)  # a learned policy loads its libraries first
            await running.until_up()
            yield running
        finally:
            await client.aclose()
            server.drain()
            await serving


@pytest.fixture
def gateway_of() -> Start:
    """Return what starts a gateway."""
    return start_gateway
