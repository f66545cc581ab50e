"""A real Prometheus server, with the configuration of deploy/, scrapes a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.launch.ports import free_port
from tests.gateway.conftest import Running, start_gateway
from tests.support.deploy_tools import DEPLOY, ROOT, tool
from tests.support.registered_metrics import sample_names
from tests.support.upstream import Wire, answer, delta

TIMEOUT_S = 20.0


@dataclass
class Prometheus:
    """The server, through its HTTP API."""

    client: httpx.AsyncClient

    async def query(self, expression: str) -> list[dict[str, Any]]:
        response = await self.client.get("/api/v1/query", params={"query": expression})
        assert response.status_code == 200, f"{expression}\n{response.text}"
        found: list[dict[str, Any]] = response.json()["data"]["result"]
        return found

    async def value(self, expression: str) -> float:
        """Wait until an expression has one value, and return it."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(found := await self.query(expression)) != 1:
                await asyncio.sleep(0.05)
        return float(found[0]["value"][1])

    async def until(self, expression: str) -> None:
        """Wait until an expression is true of something."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not await self.query(expression):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not within {TIMEOUT_S:g} s: {expression}") from None

    async def alerts(self) -> dict[str, dict[str, Any]]:
        found = (await self.client.get("/api/v1/alerts")).json()["data"]["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in found}


@contextlib.asynccontextmanager
async def prometheus_for(running: Running, folder: Path) -> AsyncIterator[Prometheus]:
    """Start a server that scrapes `running`, often; nothing else of the configuration is changed."""
    port = free_port("127.0.0.1")
    configuration = (DEPLOY / "prometheus/prometheus.yml").read_text()
    for what, instead in (
        ("gateway:8080", running.url.removeprefix("http://")),
        ("localhost:9090", f"127.0.0.1:{port}"),
        ("scrape_interval: 15s", "scrape_interval: 200ms"),
        ("evaluation_interval: 15s", "evaluation_interval: 200ms"),
    ):
        assert what in configuration
        configuration = configuration.replace(what, instead)
    (folder / "prometheus.yml").write_text(configuration)
    shutil.copy(DEPLOY / "prometheus/rules.yml", folder)
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            tool("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=output,
            stderr=output,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            async with asyncio.timeout(TIMEOUT_S):
                while not await _is_ready(client):
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.05)
            yield Prometheus(client)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/-/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def speculating(wire: Wire) -> None:
    """Answer as vLLM does that reports its speculation: 12 tokens, of which 8 were accepted out of 10 drafted."""
    document = answer(wire.upstream.name, tokens=12)
    document["metrics"] = {"speculative_decoding": {"num_draft_tokens": 10, "num_accepted_draft_tokens": 8}}
    await wire.json(document)


async def not_speculating(wire: Wire) -> None:
    """Stream as vLLM does without speculation: the role, three chunks of one token each, the usage."""
    usage = {"id": "x", "object": "chat.completion.chunk", "choices": [], "usage": answer("", tokens=3)["usage"]}
    await wire.begin_stream()
    for text in ("", "one ", "two ", "three"):
        await wire.chunk(delta(text))
    await wire.chunk(b"data: " + json.dumps(usage).encode() + b"\n\n")
    await wire.chunk(b"data: [DONE]\n\n")
    await wire.end_stream()


async def test_prometheus_scrapes_the_gateway(tmp_path: Path) -> None:
    """In one test, since a Prometheus that has just started takes 5 s to find what it is to scrape."""
    async with start_gateway() as running, prometheus_for(running, tmp_path) as prometheus:
        await prometheus.until('up{job="gateway"} == 1')
        await _the_rules_have_values(running, prometheus)
        await _it_keeps_what_is_wanted(prometheus)
        await _the_examples_of_the_page_can_be_asked(prometheus)
        await _an_alert_begins_when_a_backend_dies(running, prometheus)


async def _the_rules_have_values(running: Running, prometheus: Prometheus) -> None:
    running.upstreams["a"].behaviour = not_speculating
    running.upstreams["b"].behaviour = speculating
    for round_ in (1, 2):  # a rate needs two scrapes that differ
        for name in ("a", "b", "b"):
            headers = {"x-gateway-backend": name}
            assert (await running.chat(headers=headers, temperature=0, stream=name == "a")).status_code == 200
        await prometheus.until(f'gateway_requests_total{{backend="b",outcome="ok"}} == {2 * round_}')
    assert await prometheus.value('gateway_requests_total{backend="a",method="baseline",outcome="ok"}') == 2
    assert await prometheus.value('backend:gateway_tokens_per_step:ratio_rate5m{backend="b"}') == pytest.approx(3.0)
    assert await prometheus.value('backend:gateway_tokens_per_step:ratio_rate5m{backend="a"}') == pytest.approx(1.0)
    assert await prometheus.value('temperature:gateway_acceptance:ratio_rate5m{temperature="0"}') == pytest.approx(0.8)
    assert await prometheus.value("model:gateway_failures:ratio_rate5m") == 0.0
    assert 0.0 < await prometheus.value("model:gateway_overhead_seconds:p99_rate5m > 0") < 1.0
    assert 0.0 < await prometheus.value('backend:gateway_ttft_seconds:p95_rate5m{backend="a"} > 0') < 5.0


async def _it_keeps_what_is_wanted(prometheus: Prometheus) -> None:
    stored = {one["metric"]["__name__"] for one in await prometheus.query('{job="gateway",__name__=~"gateway_.+"}')}
    assert stored <= sample_names()  # and so no `..._created`
    assert len(stored) > 20


async def _the_examples_of_the_page_can_be_asked(prometheus: Prometheus) -> None:
    queries = re.findall(r"```promql\n(.+?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL)
    for query in queries:
        answered = await prometheus.query(query)
        assert answered or "state" in query, query  # every backend is up


async def _an_alert_begins_when_a_backend_dies(running: Running, prometheus: Prometheus) -> None:
    assert await prometheus.alerts() == {}
    await running.upstreams["b"].die()
    await prometheus.until('ALERTS{alertname="GatewayBackendDown",backend="b",alertstate="pending"}')
    assert set(await prometheus.alerts()) == {"GatewayBackendDown"}
