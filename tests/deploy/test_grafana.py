"""Grafana's dashboards: what the script makes of them, and what their expressions give on a live Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_prometheus import Prometheus, prometheus_for
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.deploy_tools import DEPLOY
from tests.support.registered_metrics import sample_names
from tests.support.stepping_engine import SteppingEngine
from tests.support.upstream import Wire
from tests.support.waiting import eventually_async

GRAFANA = DEPLOY / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}
KEY = {"authorization": "Bearer sk-1"}
METHODS = {"a": "baseline", "b": "ngram", "c": "suffix"}
ENGINES = {
    name: SteppingEngine(per_step, 0.002, tokens=12, reports=per_step > 1)
    for name, per_step in (("a", 1), ("b", 2), ("c", 3))
}
FAILING = 13


def expressions() -> Iterator[tuple[str, str]]:
    """Yield every expression with the place where it stands."""
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]


def test_the_files_are_what_the_script_makes() -> None:
    command = [sys.executable, GRAFANA / "build.py", "--check"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0, "run deploy/grafana/build.py"


def test_no_dashboard_names_a_data_source_and_ids_and_titles_differ() -> None:
    for dashboard in DASHBOARDS.values():
        assert set(re.findall(r'"uid": "([^"]*)"', json.dumps(dashboard))) == {"${datasource}", dashboard["uid"]}
        names = [variable["name"] for variable in dashboard["templating"]["list"]]
        assert names == ["datasource", "job", "instance", "model", "backend"]
        titles = [panel["title"] for panel in dashboard["panels"]]
        assert len(titles) == len(set(titles))
        assert all(panel["description"] for panel in dashboard["panels"])
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


@pytest.mark.slow
def test_expressions_use_only_existing_series() -> None:
    for place, expression in expressions():
        assert set(re.findall(r"\bgateway_\w+", expression)) <= sample_names(), place


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
async def test_every_expression_gives_data_with_one_gateway_and_with_three(tmp_path: Path) -> None:
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
