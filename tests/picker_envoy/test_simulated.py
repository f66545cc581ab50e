"""The default pool, simulated, behind Envoy: what the picker knows of answers is what clients have seen of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from lab.trace.read import read_trace
from tests.support.command import Command, gateway_command, until
from tests.support.envoy_proxy import envoy_proxy
from tests.support.metrics_page import total
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

MODEL = "llama-3.1-8b"
REQUESTS = 12


@dataclass
class Fleet:
    """Simulated replicas that Envoy serves as the picker says.

    Attributes
    ----------
    url
        Envoy's address.
    engines
        The replicas' own addresses, by name.
    """

    picker: Command
    url: str
    engines: dict[str, str]
    records: Path

    def metric(self, series: str, **labels: str) -> float:
        return total(self.picker.get("/metrics").text, series, **labels)


@dataclass
class Seen:
    """What a client has seen of one stream."""

    backend: str
    tokens: int
    ttft_s: float
    e2e_s: float


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    records, pool = folder / "records", folder / "pool.yaml"
    text = (ROOT / "config" / "pool.yaml").read_text().replace("h100}", "h100, time_scale: 0.2, max_model_len: 65536}")
    assert "time_scale" in text
    pool.write_text(f"{text}\nrecorder: {{path: '{records}', flush_s: 0.05}}\n")
    with gateway_command(pool, folder, "--listen", "127.0.0.1:0", subcommand="picker") as picker:
        until(lambda: picker.get("/readyz").status_code == 200)
        backends = picker.get("/admin/pool", headers=picker.admin).json()["models"][MODEL]["backends"]
        engines = {name: backend["url"] for name, backend in backends.items()}
        replicas = [url.removeprefix("http://") for url in engines.values()]
        with envoy_proxy(folder, [picker.picker], replicas) as envoy:
            until(lambda: httpx.get(f"{envoy.urls['']}/v1/models", trust_env=False).status_code == 200)
            yield Fleet(picker, envoy.urls[""], engines, records)


def body(text: str, tokens: int) -> dict[str, object]:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens}
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def stream(url: str, text: str, tokens: int) -> tuple[str, Seen]:
    """Read a stream to its end; return the id of its request, and what was seen."""
    began_s, first_s, used = time.monotonic(), 0.0, 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body(text, tokens), trust_env=False) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            first_s = first_s or time.monotonic()
            if line.startswith("data: {") and (usage := json.loads(line.removeprefix("data: ")).get("usage")):
                used = usage["completion_tokens"]
    backend = answer.headers["x-gateway-backend"]
    return answer.headers["x-request-id"], Seen(backend, used, first_s - began_s, time.monotonic() - began_s)


def test_streams_are_counted_as_clients_saw_them(fleet: Fleet) -> None:
    texts = [f"Tell me about subject {number}. " + "Take your time. " * 40 * number for number in range(REQUESTS)]
    with ThreadPoolExecutor(4) as threads:
        seen = dict(threads.map(lambda text: stream(fleet.url, text, 16 + len(text) % 32), texts))
    assert len(seen) == REQUESTS
    until(lambda: fleet.metric("gateway_requests_total", outcome="ok") == REQUESTS)
    for backend in fleet.engines:
        tokens = sum(each.tokens for each in seen.values() if each.backend == backend)
        assert fleet.metric("gateway_output_tokens_total", backend=backend) == tokens
    assert fleet.metric("gateway_ttft_seconds_count") == REQUESTS
    assert fleet.metric("gateway_ttft_seconds_sum") < sum(each.e2e_s for each in seen.values())

    def recorded() -> bool:
        return (
            fleet.records.exists() and any(fleet.records.iterdir()) and len(list(read_trace(fleet.records))) == REQUESTS
        )

    until(recorded, what="the records")
    for record in read_trace(fleet.records):
        client = seen[record.id]
        assert (record.backend, record.output_tokens, record.status) == (client.backend, client.tokens, 200)
        assert record.ttft_s is not None
        assert record.e2e_s is not None
        assert 0 < record.ttft_s < record.e2e_s
        assert sum(record.itl) == pytest.approx(record.e2e_s - record.ttft_s, abs=0.05)
        assert len(record.candidates) == len(fleet.engines)
        assert record.spec is not None, "acceptance is learned from the answers"


def test_a_client_that_leaves_frees_the_replica(fleet: Fleet) -> None:
    """The answer would take more than a minute, so it is not complete before the client leaves."""
    before = fleet.metric("gateway_requests_total", outcome="cancelled")
    request, backend = body("Write a book.", 60_000) | {"ignore_eos": True}, "plain"
    headers = {"x-gateway-backend": backend}
    url = f"{fleet.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=request, headers=headers, trust_env=False) as answer:
        assert answer.headers["x-gateway-backend"] == backend
        lines = answer.iter_lines()
        next(lines)
        assert fleet.metric("gateway_in_flight", backend=backend) == 1
    until(lambda: fleet.metric("gateway_in_flight") == 0)
    until(lambda: fleet.metric("gateway_requests_total", outcome="cancelled") == before + 1)
    engine = f"{fleet.engines[backend]}/metrics"
    until(lambda: total(httpx.get(engine, trust_env=False).text, "vllm:num_requests_running") == 0)
