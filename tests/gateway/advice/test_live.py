"""`GET /admin/advice` and `gateway advise` on a running gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from typer.testing import CliRunner

from backends.engine_metrics import EngineMetrics
from gateway.cli.app import app
from tests.gateway.conftest import ADMIN_KEY, MODEL, start_gateway

PAGE = """vllm:cache_config_info{{engine="0",enable_prefix_caching="{caching}"}} 1.0
vllm:prefix_cache_queries_total{{engine="0"}} 200000.0
vllm:prefix_cache_hits_total{{engine="0"}} 50000.0
"""


async def test_advice_from_live_figures_by_route_and_command(tmp_path: Path) -> None:
    async with start_gateway(policy={"name": "learned", "seed": 0}) as running:
        for name, caching in (("a", "True"), ("b", "False")):
            running.upstreams[name].metrics += PAGE.format(caching=caching).encode()

        def engine(name: str) -> EngineMetrics:
            found = running.gateway.pool.engine(running.backend(name))
            assert found is not None
            return found

        await running.until(lambda: engine("a").prefix_queries > 0 and engine("b").prefix_caching == 0)
        assert (await running.client.get("/admin/advice")).status_code == 401
        answer = await running.client.get("/admin/advice", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        advised = answer.json()["models"][MODEL]
        assert advised["learns"]
        assert [(each["rule"], each["backend"]) for each in advised["findings"]] == [("prefix_caching", "b")]

        path = tmp_path / "advice.json"
        line = ["advise", "--url", running.url, "--admin-key", ADMIN_KEY, "--json", str(path)]
        result = await asyncio.to_thread(CliRunner().invoke, app, line)
        assert result.exit_code == 0, result.output
        assert "m: 1 change." in result.stdout
        assert "1. b: its prefix cache is off" in result.stdout
        assert json.loads(path.read_text()) == answer.json()
        result = await asyncio.to_thread(CliRunner().invoke, app, [*line, "--model", "other"])
        assert result.exit_code == 2
        assert "there are: m" in result.output


async def test_a_policy_that_does_not_learn_says_so() -> None:
    async with start_gateway() as running:
        line = ["advise", "--url", running.url, "--admin-key", ADMIN_KEY]
        result = await asyncio.to_thread(CliRunner().invoke, app, line)
        assert "learns no step times" in result.stdout
