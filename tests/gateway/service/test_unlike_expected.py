"""Engines that speculate otherwise than the pool file says, or the policy expects: where it shows, and what is done."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from backends.backend import Backend, EngineChange
from backends.draft_schedule import DraftSchedule, Speculation
from backends.speculation import Method
from backends.step_comparison import Difference
from gateway.service.assembly import ReplicaEvents, is_same_replica
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.silence import silence

LEARNED = {"name": "learned", "seed": 0, "guardrail": {"share": 0}}
IDLE = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"


def page(k: int = 0, drafts: int = 0, later_steps: int = 0) -> bytes:
    """Return the metrics page of an engine that drafts `k` tokens at a time; 0 does not speculate."""
    lines = [f"vllm:inter_token_latency_seconds_count {later_steps}", f"vllm:generation_tokens_total {later_steps}"]
    if k:
        lines += [
            f"vllm:spec_decode_num_drafts_total {drafts}",
            f"vllm:spec_decode_num_draft_tokens_total {k * drafts}",
        ]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{position="{position}"}} {drafts // 2}' for position in range(k)]
    return IDLE + "\n".join(lines).encode() + b"\n"


async def backends(running: Running) -> Any:
    return (await running.admin("pool"))["models"][MODEL]["backends"]


@pytest.mark.slow
async def test_swapped_methods_show_everywhere_and_policies_go_by_what_is_observed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The file says that a is a baseline and b n-gram with k 5; a is EAGLE with k 3 in fact, and b a baseline."""
    caplog.set_level(logging.INFO)
    async with start_gateway(policy=LEARNED) as running:
        learned: Any = running.gateway.models[MODEL].policy
        await running.chat()
        replicas = learned.known.replicas
        assert {name: replica.arm for name, replica in replicas.items()} == {"a": "baseline:0", "b": "ngram:5"}
        running.upstreams["a"].metrics, running.upstreams["b"].metrics = page(k=3, drafts=850, later_steps=850), page()
        await running.until(
            lambda: running.backend("a").engine.contradictions and running.backend("b").engine.contradictions
        )

        a = f"{MODEL}/a: the pool file says baseline, but its engine speculates, with k 3"
        b = f"{MODEL}/b: the pool file says ngram with k 5, but its engine does not speculate"
        await running.until(lambda: caplog.messages.count(a) == caplog.messages.count(b) == 1)

        shown = (await backends(running))["a"]
        assert (shown["method"], shown["contradictions"]) == (
            "baseline",
            {"speculation": "its engine speculates, with k 3"},
        )
        assert shown["observed"] == {"method": "custom_class", "num_speculative_tokens": 3}

        on_page = {name: each["contradiction"] for name, each in (await running.on_page()).items()}
        assert on_page == {"a": a.partition(": ")[2], "b": b.partition(": ")[2]}

        for name, method, kind in (("a", "baseline", "speculation"), ("b", "ngram", "no_speculation")):
            labels = {"backend": name, "kind": kind, "method": method}
            assert await running.counted("gateway_backend_contradiction", **labels) == 1

        # A baseline that drafts is not taken to give one token per step, nor an engine without drafts to give more.
        await running.chat()
        assert {name: replica.arm for name, replica in replicas.items()} == {"a": "custom_class:3", "b": "baseline:0"}
        per_step = {name: note.partition(" per step")[0][-4:] for name, note in (await running.notes()).items()}
        assert per_step["b"] == "1.00"
        assert float(per_step["a"]) > 1.3

        running.upstreams["a"].metrics, running.upstreams["b"].metrics = page(), page(k=5)
        await running.until(
            lambda: not running.backend("a").engine.contradictions and not running.backend("b").engine.contradictions
        )
        assert {each["observed"]["method"] for each in (await backends(running)).values()} == {"baseline", "ngram"}
        assert f"{MODEL}/b speculates as the pool file says: ngram with k 5" in caplog.messages


async def test_a_difference_between_answers_and_engine_is_shown_and_corrected() -> None:
    async with start_gateway({"b": "ngram"}, policy=LEARNED) as running:
        learned: Any = running.gateway.models[MODEL].policy
        backend = running.backend("b")
        backend.engine.comparison.difference = Difference(shown=3.0, counted=2.0)
        ReplicaEvents(running.gateway).difference_changed(backend)
        assert learned.known.corrections["b"] == pytest.approx(2 / 3)
        assert (await running.on_page())["b"]["difference"] == str(backend.difference)
        backend.engine.comparison.difference = None
        ReplicaEvents(running.gateway).difference_changed(backend)
        assert "b" not in learned.known.corrections


def test_a_replica_that_contradicts_the_file_is_the_same_after_a_reload() -> None:
    running, again = (Backend("a", MODEL, Method.EAGLE3, "http://a", num_speculative_tokens=3) for _ in range(2))
    running.observe({"k": "its engine drafts with k 5"}, Speculation(Method.EAGLE3, DraftSchedule(5)))
    assert is_same_replica(running, again)
    assert not is_same_replica(running, Backend("a", MODEL, Method.EAGLE3, "http://a", num_speculative_tokens=5))
    assert not is_same_replica(running, Backend("a", MODEL, Method.EAGLE3, "http://a", 3, draft_depth=True))


# Silent drafters


async def shown(running: Running) -> Any:
    return (await backends(running))["b"]["drafter_silent"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [LEARNED, {"name": "least_loaded", "outlier_ejection": True}])
async def test_a_silent_drafter_is_shown_until_its_engine_restarts(policy: dict[str, Any]) -> None:
    async with start_gateway(policy=policy) as running:
        detector: Any = running.gateway.models[MODEL].detector
        assert await shown(running) is None
        await running.chat()
        silence(detector, "b")
        assert await shown(running) == {
            "cause": "unknown",
            "since_s": 0.0,
            "expected_tokens_per_step": 2.0,
            "tokens_per_step": 1.0,
        }
        on_page = await running.on_page()
        assert on_page["a"]["silence"] is None
        assert on_page["b"]["silence"] == "its drafter is silent: 0% of the accepted drafts that were expected"
        assert await running.counted("gateway_backend_drafter_silent", backend="b", cause="unknown") == 1
        notes = await running.notes()
        assert "its drafter is silent: 0% of the accepted drafts" in notes["b"]
        assert "silent" not in notes["a"]
        ReplicaEvents(running.gateway).engine_changed(running.backend("b"), EngineChange.RESTART)
        assert await shown(running) is None
