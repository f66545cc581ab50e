"""The page of `/metrics`: lint by promtool, OpenMetrics, and exemplars."""

from __future__ import annotations

import asyncio
import subprocess

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.gateway.conftest import Running, Start, start_gateway
from tests.support.deploy_tools import tool

TRACE = "0af7651916cd43dd8448eb211c80319c"
OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


def exemplars_of(page: str) -> dict[str, list[dict[str, str]]]:
    """Return the labels of all exemplars by name of the histogram, and check that they belong to their buckets."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.exemplar is not None:
                assert sample.exemplar.value <= float(sample.labels["le"])
                assert sample.value >= 1
                found.setdefault(family.name, []).append(sample.exemplar.labels)
    return found


async def page_of(running: Running, **headers: str) -> str:
    response = await running.client.get("/metrics", headers=headers)
    assert response.status_code == 200
    return response.text


async def test_exemplars_name_the_trace_or_else_the_request(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, telemetry={"exemplars": True}) as running:
        await running.chat(stream=True, headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
        traced = exemplars_of(await page_of(running, **OPENMETRICS))
        assert set(traced) == {"gateway_ttft_seconds", "gateway_e2e_seconds"}
        assert traced["gateway_e2e_seconds"] == traced["gateway_ttft_seconds"] == [{"trace_id": TRACE}]
        await running.chat(headers={"x-request-id": "r-7"})
        assert {"request_id": "r-7"} in exemplars_of(await page_of(running, **OPENMETRICS))["gateway_e2e_seconds"]
        await running.chat(headers={"x-request-id": "r" * 200})  # longer than OpenMetrics allows
        exemplars_of(await page_of(running, **OPENMETRICS))
        assert "r-7" not in await page_of(running)  # the text format has none


async def test_without_the_setting_there_are_none_and_the_types_are_as_asked_for() -> None:
    async with start_gateway({"a": "baseline"}) as running:
        await running.chat(stream=True)
        assert exemplars_of(await page_of(running, **OPENMETRICS)) == {}
        for accept, content_type in (
            (OPENMETRICS["accept"], "application/openmetrics-text; version=1.0.0"),
            ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
            ("text/plain;version=1.0.0;escaping=allow-utf-8", "text/plain; version=0.0.4; charset=utf-8"),
        ):
            response = await running.client.get("/metrics", headers={"accept": accept})
            assert response.headers["content-type"].startswith(content_type)


async def test_the_page_keeps_the_conventions_for_names() -> None:
    async with start_gateway(policy={"name": "learned"}) as running:
        await running.chat(stream=True)
        page = await page_of(running)
    command = [tool("promtool"), "check", "metrics"]
    result = await asyncio.to_thread(
        subprocess.run, command, input=page, capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
