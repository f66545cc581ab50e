"""A Prometheus server with the configuration of deploy/ scrapes a running gateway."""

from __future__ import annotations

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
from tests.support.deploy_tools import DEPLOY, ROOT, replaced, tool
from tests.support.front_proxy import proxy_process
from tests.support.registered_metrics import sample_names
from tests.support.stepping_engine import SteppingEngine
from tests.support.waiting import eventually_async

TIMEOUT_S = 20.0


@dataclass
class Prometheus:
    """Client of the server's HTTP API."""

    client: httpx.AsyncClient

    async def query(self, expression: str) -> list[dict[str, Any]]:
        response = await self.client.get("/api/v1/query", params={"query": expression})
        assert response.status_code == 200, f"{expression}\n{response.text}"
        result: list[dict[str, Any]] = response.json()["data"]["result"]
        return result

    async def value(self, expression: str) -> float:
        """Wait until an expression has exactly one value, and return it."""
        result: list[dict[str, Any]] = []

        async def has_one_value() -> bool:
            nonlocal result
            result = await self.query(expression)
            return len(result) == 1

        await eventually_async(has_one_value, TIMEOUT_S, expression)
        return float(result[0]["value"][1])

    async def until(self, expression: str) -> None:
        """Wait until an expression has a result."""
        await eventually_async(lambda: self.query(expression), TIMEOUT_S, expression)

    async def alerts(self) -> dict[str, dict[str, Any]]:
        alerts = (await self.client.get("/api/v1/alerts")).json()["data"]["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts}


@contextlib.asynccontextmanager
async def prometheus_for(folder: Path, *gateways: Running) -> AsyncIterator[Prometheus]:
    """Run a server that scrapes gateways at short intervals, with an otherwise unchanged configuration."""
    port = free_port("127.0.0.1")
    configuration = (DEPLOY / "prometheus/prometheus.yml").read_text()
    configuration = replaced(
        configuration,
        {
            '["gateway:8080"]': json.dumps([running.url.removeprefix("http://") for running in gateways]),
            "localhost:9090": f"127.0.0.1:{port}",
            "scrape_interval: 15s": "scrape_interval: 200ms",
            "evaluation_interval: 15s": "evaluation_interval: 200ms",
        },
    )
    (folder / "prometheus.yml").write_text(configuration)
    shutil.copy(DEPLOY / "prometheus/rules.yml", folder)
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data"}
    command = [f"--{name}={value}" for name, value in {**options, "web.listen-address": f"127.0.0.1:{port}"}.items()]
    async with (
        proxy_process(
            tool("prometheus"), *command, url=f"http://127.0.0.1:{port}", log=folder / "prometheus.log"
        ) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):

        async def is_ready() -> bool:
            return (await client.get("/-/ready")).status_code == 200

        await eventually_async(is_ready, TIMEOUT_S)
        yield Prometheus(client)


@pytest.mark.slow
async def test_prometheus_scrapes_the_gateway(tmp_path: Path) -> None:
    """One test for all checks, because Prometheus takes 5 s to start scraping."""
    async with start_gateway() as running, prometheus_for(tmp_path, running) as prometheus:
        await prometheus.until('up{job="gateway"} == 1')
        await _check_recording_rules(running, prometheus)
        await _check_stored_series(prometheus)
        await _check_documented_queries(prometheus)
        await _check_alert_for_a_dead_backend(running, prometheus)


async def _check_recording_rules(running: Running, prometheus: Prometheus) -> None:
    running.upstreams["a"].behaviour = SteppingEngine(tokens=3, forces=True)
    running.upstreams["b"].behaviour = SteppingEngine(3, tokens=12, reports=True)  # accepts 8 of 12 drafted tokens
    for round_ in (1, 2):  # a rate needs two different scrapes
        for name in ("a", "b", "b"):
            headers = {"x-gateway-backend": name}
            assert (await running.chat(headers=headers, temperature=0, stream=name == "a")).status_code == 200
        await prometheus.until(f'gateway_requests_total{{backend="b",outcome="ok"}} == {2 * round_}')
    assert await prometheus.value('gateway_requests_total{backend="a",method="baseline",outcome="ok"}') == 2
    assert await prometheus.value(
        'temperature:gateway_tokens_per_step:ratio_rate5m{method!="baseline"}'
    ) == pytest.approx(3.0)
    assert await prometheus.value(
        'temperature:gateway_tokens_per_step:ratio_rate5m{method="baseline"}'
    ) == pytest.approx(1.0)
    assert await prometheus.value('temperature:gateway_acceptance:ratio_rate5m{temperature="0"}') == pytest.approx(
        8 / 12
    )
    assert await prometheus.value("model:gateway_failures:ratio_rate5m") == 0.0
    assert 0.0 < await prometheus.value("model:gateway_overhead_seconds:p99_rate5m > 0") < 1.0
    assert 0.0 < await prometheus.value('backend:gateway_ttft_seconds:p95_rate5m{backend="a"} > 0') < 5.0


async def _check_stored_series(prometheus: Prometheus) -> None:
    stored = {
        series["metric"]["__name__"] for series in await prometheus.query('{job="gateway",__name__=~"gateway_.+"}')
    }
    assert stored <= sample_names()  # excludes `..._created`
    assert len(stored) > 20


async def _check_documented_queries(prometheus: Prometheus) -> None:
    queries = re.findall(r"```promql\n(.+?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL)
    for query in queries:
        result = await prometheus.query(query)
        assert result or "state" in query, query  # every backend is up


async def _check_alert_for_a_dead_backend(running: Running, prometheus: Prometheus) -> None:
    assert await prometheus.alerts() == {}
    await running.upstreams["b"].die()
    await prometheus.until('ALERTS{alertname="GatewayBackendDown",backend="b",alertstate="pending"}')
    assert set(await prometheus.alerts()) == {"GatewayBackendDown"}
