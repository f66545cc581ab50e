"""`GET /admin/advice` and `gateway advise` on a running gateway."""

from __future__ import annotations

import pytest
from prometheus_client.samples import Sample

from backends.backend import Backend
from backends.engine_metrics import EngineMetrics
from backends.speculation import Method
from gateway.rooms.advice import room
from gateway.rooms.advice.finding import Finding, Gain
from tests.gateway.conftest import MODEL, start_gateway


async def test_advice_by_route_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    gain = Gain(0.2, 0.1, 0.3, "time")
    found = Finding("memory", MODEL, "b", "its KV cache is too small", gain, "30 minutes", "vllm serve")
    monkeypatch.setattr(room, "advise", lambda model: [found] if len(model.backends) == 2 else [])
    async with start_gateway(policy={"name": "learned", "seed": 0}) as running:
        assert (await running.client.get("/admin/advice")).status_code == 401
        advised = (await running.admin("advice"))["models"][MODEL]
        assert advised["learns"]
        assert [(each["rule"], each["backend"]) for each in advised["findings"]] == [("memory", "b")]

        result = await running.command("advise")
        assert result.exit_code == 0, result.output
        assert "m: 1 change." in result.stdout
        assert "1. b: its KV cache is too small" in result.stdout
        assert "Steps that were not measured here are by a calibration: llama-3.1-8b-h100 is" in result.stdout
        assert "20% of the time (95%: 10% to 30%)" in result.stdout


def test_requests_of_a_backend_count_under_each_method_that_it_has_had() -> None:
    labels = {"model": MODEL, "backend": "a", "le": "2048.0"}
    samples = [
        Sample("gateway_context_tokens_bucket", labels | {"method": method}, count)
        for method, count in (("ngram", 3.0), ("suffix", 2.0))
    ]
    assert room.contexts_of(samples) == {(MODEL, "a"): {2048.0: 5.0}}


@pytest.mark.parametrize(
    ("config", "is_even"),
    [
        ({}, True),
        ({"num_speculative_tokens_per_batch_size": [[1, 16, 5], [17, 256, 1]]}, False),
        ({"enable_adaptive_verification": True}, False),
    ],
)
def test_where_drafts_have_unlike_lengths_the_counts_by_position_advise_no_k(
    config: dict[str, object], is_even: bool
) -> None:
    backend = Backend("a", MODEL, Method.EAGLE3, "http://a", 5, config)
    backend.engine.metrics = EngineMetrics(drafts=100, accepted_per_position=(70, 3, 2, 1, 1))
    assert (room.evidence_of(backend, {}).positions is not None) == is_even
