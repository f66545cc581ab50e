"""Draining with `move`, with two workers and simulated replicas."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.command import Command, gateway_command, until, until_ready

POOL = """
admin: {key: "${GATEWAY_ADMIN_KEY}"}
models:
  m:
    policy: {name: round_robin}
    rescue: true
    backends:
      a: {method: baseline, simulate: {calibration: llama-3.1-8b-h100}}
      b: {method: ngram, speculative_config: {num_speculative_tokens: 3}, simulate: {calibration: llama-3.1-8b-h100}}
"""
STREAMS, TOKENS = 8, 300


def metric(command: Command, name: str, **labels: str) -> float:
    """Return the sum of a metric over all workers."""
    families = text_string_to_metric_families(command.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())


def ask(command: Command, number: int) -> tuple[int, str]:
    """Stream an answer; return its tokens by its usage, and the finish reason."""
    body = {
        "messages": [{"role": "user", "content": f"Write {number} lines of code."}],
        "model": "m",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = httpx.post(f"{command.url}/v1/chat/completions", json=body, timeout=60, trust_env=False).text
    tokens, reason = 0, ""
    for line in answer.splitlines():
        if line.startswith("data: {"):
            document = json.loads(line[6:])
            assert "error" not in document, document
            tokens = (document.get("usage") or {}).get("completion_tokens", tokens)
            reason = next((choice["finish_reason"] or reason for choice in document["choices"]), reason)
    assert answer.endswith("data: [DONE]\n\n")
    return tokens, reason


@pytest.mark.slow
def test_streams_of_all_workers_are_moved(tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL)
    with gateway_command(pool, tmp_path, "--workers", "2") as command, ThreadPoolExecutor(STREAMS) as threads:
        until_ready(command)
        asking = [threads.submit(ask, command, number) for number in range(STREAMS)]
        until(lambda: metric(command, "gateway_in_flight", backend="a") >= STREAMS // 3)
        sent = {"model": "m", "backend": "a", "move": True}
        command.post("/admin/drain", sent, headers=command.admin).raise_for_status()
        until(lambda: metric(command, "gateway_in_flight", backend="a") == 0)
        assert [answer.result() for answer in asking] == [(TOKENS, "length")] * STREAMS
        until(lambda: metric(command, "gateway_rescues_total", backend="a", outcome="complete") >= 1)
        assert metric(command, "gateway_rescues_total", outcome="failed") == 0
