"""A Prometheus server with the configuration of deploy/ scrapes running gateways: dashboards and pages have data."""

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
from tests.deploy.test_grafana import DASHBOARDS, expressions
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.deploy_tools import DEPLOY, replaced, tool
from tests.support.front_proxy import proxy_process
from tests.support.paths import ROOT
from tests.support.registered_metrics import sample_names
from tests.support.stepping_engine import SteppingEngine
from tests.support.upstream import Wire
from tests.support.waiting import eventually_async

TIMEOUT_S = 20.0
KEY = {"authorization": "Bearer sk-1"}
METHODS = {"a": "baseline", "b": "ngram", "c": "suffix"}
ENGINES = {
    name: SteppingEngine(per_step, 0.002, tokens=12, reports=per_step > 1)
    for name, per_step in (("a", 1), ("b", 2), ("c", 3))
}
FAILING = 13


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
        """Return the one value of an expression."""
        (result,) = await self.query(expression)
        return float(result["value"][1])


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


async def speculating(wire: Wire) -> None:
    """Answer as an engine whose steps emit as many tokens as its name says; a request with a certain seed fails."""
    if wire.seen.json.get("seed") == FAILING and wire.upstream.name == "b":
        await wire.json({"error": {"message": "broken", "code": 500}}, 500)
    else:
        await ENGINES[wire.upstream.name](wire)


async def ask(running: Running) -> None:
    """Send requests of all kinds: to each replica, to any of them, more than there is room for, and one that fails."""
    for name in METHODS:
        for stream in (True, False):
            assert (await running.chat(stream=stream, headers=KEY | {"x-gateway-backend": name})).status_code == 200
    together = [running.chat(stream=True, temperature=0.7, headers=KEY) for _ in range(8)]
    assert {response.status_code for response in await asyncio.gather(*together)} == {200}
    for _ in range(3):
        await running.chat(seed=FAILING, headers=KEY)


def concrete(expression: str, instance: str) -> str:
    """Return an expression as Grafana sends it, with a gateway or all of them chosen."""
    values = {"job": "gateway", "instance": instance, "model": ".*", "backend": ".*", "__rate_interval": "1m"}
    for name, value in values.items():
        expression = re.sub(rf"\${name}\b", value.replace("\\", r"\\"), expression)
    assert "$" not in expression
    return expression


async def labels_of(prometheus: Prometheus, expression: str, instance: str) -> set[frozenset[tuple[str, str]]]:
    """Return the labels of what an expression gives, without values that are no number, but where that says something.

    The comparison with `least_loaded` is none as long as it is too early to tell, as it is after some seconds.
    """
    result = await prometheus.query(concrete(expression, instance))
    says_nothing = "" if expression.startswith("gateway_policy_ratio_to_least_loaded") else "NaN"
    return {frozenset(each["metric"].items()) for each in result if each["value"][1] != says_nothing}


_LATER = re.compile(r"gateway_(pool_saturation|replicas_|fleet_|slo_|backend_(tokens_per_step|acceptance))")
"""Series that need targets and an hour of traffic, or the counters of an engine, which these gateways do not have."""


@pytest.mark.slow
async def test_everything_asked_of_prometheus_gives_data_with_one_gateway_and_with_three(tmp_path: Path) -> None:
    """One test for all, because Prometheus takes 5 s to start scraping."""
    async with contextlib.AsyncExitStack() as stack:
        gateways = []
        for number in range(3):
            start = start_gateway(
                METHODS,
                {"name": "learned", "guardrail": {"share": 0.5}},
                behaviour=speculating,
                queue={"max_in_flight_per_backend": 1, "max_waiting": 20, "max_wait_s": 10},
                keys=[{"name": "team", "key": "sk-1", "may_override": True}],
                recorder={"path": str(tmp_path / f"traces-{number}")},
                telemetry={"access_log": 1.0},
                state={"file": str(tmp_path / f"state-{number}.sqlite")},
            )
            gateways.append(await stack.enter_async_context(start))
        prometheus = await stack.enter_async_context(prometheus_for(tmp_path, *gateways))
        first = gateways[0].url.removeprefix("http://")
        missing = [each for each in expressions() if not _LATER.search(each[1])]

        async def all_give_data() -> bool:
            await asyncio.gather(*map(ask, gateways))
            for each in list(missing):
                _, expression = each
                one = await labels_of(prometheus, expression, first)
                three = await labels_of(prometheus, expression, ".*")
                if one and three:
                    missing.remove(each)
            return not missing

        with contextlib.suppress(AssertionError):
            await eventually_async(all_give_data)
        assert not missing, "\n".join(f"{place}: {expression}" for place, expression in missing)
        await _check_that_gateways_are_summed(prometheus, first)
        await _check_variables(prometheus)
        await _check_stored_series_and_documented_queries(prometheus)


async def _check_that_gateways_are_summed(prometheus: Prometheus, first: str) -> None:
    """Three gateways give the series of one, with their sums, except where the title says that it is by gateway."""
    for place, expression in expressions():
        if _LATER.search(expression):
            continue
        by_gateway = "by gateway" in place or "gateway_policy_ratio" in expression
        one = await labels_of(prometheus, expression, first)
        three = await labels_of(prometheus, expression, ".*")
        shown = {dict(labels).get("instance") for labels in three}
        assert (len(shown) == 3) if by_gateway else (shown == {None} and len(three) <= 2 * len(one) + 4), place
    total = 'sum(gateway_requests_total{job="gateway",instance=~"$instance"})'
    every = [await prometheus.value(concrete(total, instance)) for instance in (first, ".*")]
    assert 2.0 < every[1] / every[0] < 4.0


async def _check_variables(prometheus: Prometheus) -> None:
    """Each variable offers the values that there are."""
    expected: dict[str, Any] = {"job": {"gateway"}, "model": {MODEL}, "backend": set(METHODS)}
    for variable in DASHBOARDS["traffic"]["templating"]["list"][1:]:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert match
        parameters = {"match[]": concrete(match[1], ".*")}
        values = (await prometheus.client.get(f"/api/v1/label/{match[2]}/values", params=parameters)).json()["data"]
        assert set(values) == expected.get(variable["name"], set(values))
        assert len(values) == {"job": 1, "instance": 3, "model": 1, "backend": 3}[variable["name"]]


async def _check_stored_series_and_documented_queries(prometheus: Prometheus) -> None:
    stored = await prometheus.query('group by (__name__) ({job="gateway",__name__=~"gateway_.+"})')
    assert {series["metric"]["__name__"] for series in stored} <= sample_names()  # excludes `..._created`
    assert len(stored) > 20
    for query in re.findall(r"```promql\n(.+?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL):
        assert await prometheus.query(query), query
    for name, method in METHODS.items():
        recorded = await prometheus.value(f'max(temperature:gateway_tokens_per_step:ratio_rate5m{{method="{method}"}})')
        assert recorded == pytest.approx(ENGINES[name].per_step)
