"""`gateway tune --schedule --live`: from what the engines of a running gateway have counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.config.load import load_pool
from tests.gateway.conftest import ADMIN_KEY, MODEL, start_gateway

POOL = f"""\
models:
  {MODEL}:
    policy: {{name: least_loaded}}
    backends:
      a:
        method: eagle3
        url: http://a # elsewhere
        speculative_config: {{num_speculative_tokens: 3}}
      b: {{method: baseline, url: http://b}}
"""
PAGE = """
vllm:num_requests_running{engine="0"} 40.0
vllm:kv_cache_usage_perc{engine="0"} 0.1
vllm:spec_decode_num_drafts_total{engine="0"} 10000.0
""" + "".join(
    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{position}"}} {count}\n'
    for position, count in enumerate((6500, 3500, 1500))
)


async def test_a_schedule_from_the_counters_of_a_running_gateway(tmp_path: Path) -> None:
    pool, out = tmp_path / "pool.yaml", tmp_path / "out.yaml"
    pool.write_text(POOL)
    line = ["tune", "--schedule", "--live", "--config", str(pool), "--out", str(out)]
    async with start_gateway() as running:
        line += ["--url", running.url, "--admin-key", ADMIN_KEY]
        result = await asyncio.to_thread(CliRunner().invoke, app, line)
        assert result.exit_code == 2
        assert "a: it has not drafted yet" in result.stderr

        running.upstreams["a"].metrics = PAGE.encode()
        backend = running.backend("a")
        await running.until(lambda: (engine := running.gateway.pool.engine(backend)) is not None and engine.drafts > 0)
        result = await asyncio.to_thread(CliRunner().invoke, app, line)
        assert result.exit_code == 0, result.output

        pool.write_text(out.read_text())
        again = await asyncio.to_thread(CliRunner().invoke, app, line)
        assert again.exit_code == 2
        assert "a: its counters mix several k" in again.stderr
    assert "tokens that draft 1, 2, ... adds to a step: 65%, 35%, 15%" in result.stdout
    assert "mean context: 1,0" in result.stdout  # a tenth of the KV cache for 40 requests
    assert "b (baseline): it does not speculate" in result.stdout
    assert "# elsewhere" in out.read_text()
    config = load_pool(out).models[MODEL].backends["a"].speculative_config
    assert config is not None
    ranges = config.num_speculative_tokens_per_batch_size
    assert ranges is not None
    assert (ranges[0][2], ranges[-1][2]) == (2, 1)
