"""The metrics page has vLLM's names and can be parsed by a Prometheus client."""

from __future__ import annotations

import math
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from backends.backend import EngineLoad
from backends.simulator.engine.step import Counters
from backends.simulator.server.metrics import Histogram, ReplicaMetrics, Tallies, page

IDLE = EngineLoad()
HELLO = [{"role": "user", "content": "Repeat this exactly: " + "the quick brown fox jumps over the lazy dog. " * 8}]
COUNTERS = {
    *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:prompt_tokens"),
    *("vllm:prompt_tokens_by_source", "vllm:prompt_tokens_cached", "vllm:generation_tokens", "vllm:request_success"),
    "vllm:admission_rejections",
}
SPECULATION = {
    *("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"),
    "vllm:spec_decode_num_accepted_tokens_per_pos",
}
GAUGES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason"),
    "vllm:kv_cache_usage_perc",
}
HISTOGRAMS = {
    *("vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:iteration_tokens_total"),
    *("vllm:request_max_num_generation_tokens", "vllm:request_params_n", "vllm:request_params_max_tokens"),
    *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"),
    *("vllm:request_time_per_output_token_seconds", "vllm:request_queue_time_seconds"),
    *("vllm:request_inference_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"),
    "vllm:request_prefill_kv_computed_tokens",
}


def render(
    max_model_len: int, load: EngineLoad = IDLE, name: str = "m", *, speculating: bool = False, prompt_tokens: int = 0
) -> str:
    counters = Counters(np.zeros(3, np.int64), prompt_tokens=prompt_tokens)
    tallies = Tallies(max_model_len)
    metrics = ReplicaMetrics(tallies, lambda: load, lambda: counters, name, speculating=speculating)
    return page(metrics.families()).decode()


def families(page: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(page)}


def values(page: str) -> dict[str, float]:
    """Return the samples of a page by name, summed over their labels, and by name and labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
            labels = {name: value for name, value in sample.labels.items() if name not in ("engine", "model_name")}
            found[f"{sample.name}{sorted(labels.items())}"] = sample.value
    return found


def test_names_and_types() -> None:
    found = families(render(8192, EngineLoad(1, 2, 0.5), speculating=True))
    for names, kind in ((COUNTERS | SPECULATION, "counter"), (GAUGES, "gauge"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert found[name].type == kind, name
            for sample in found[name].samples:
                assert sample.labels["model_name"] == "m"
                assert sample.labels.get("engine") == (None if "admission" in name else "0")
    positions = found["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [sample.labels["position"] for sample in positions if sample.name.endswith("_total")] == ["0", "1", "2"]
    reasons = {sample.labels["finished_reason"] for sample in found["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}
    assert "process_resident_memory_bytes" in found


def test_a_baseline_has_no_speculation_counters() -> None:
    found = families(render(8192))
    assert not SPECULATION & set(found)


def test_token_buckets_end_at_the_context_length() -> None:
    found = families(render(2048))
    bounds = [sample.labels["le"] for sample in found["vllm:request_prompt_tokens"].samples if "le" in sample.labels]
    assert bounds == [
        "1.0",
        "2.0",
        "5.0",
        "10.0",
        "20.0",
        "50.0",
        "100.0",
        "200.0",
        "500.0",
        "1000.0",
        "2000.0",
        "+Inf",
    ]


def test_model_names_are_escaped() -> None:
    name = 'a "model"\\of\nmine'
    found = families(render(2048, EngineLoad(running=3), name))
    assert found["vllm:num_requests_running"].samples[0].labels["model_name"] == name


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram("tokens", "Tokens.", (1, 2, 5))
    for value in (0.5, 1, 1.5, 2, 7):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("5.0", 4), ("+Inf", 5)]
    assert histogram.sum == 12.0


@pytest.mark.parametrize(("count", "written"), [(0, "0.0"), (999999, "999999.0"), (1234567, "1.234567e+06")])
def test_numbers_are_formatted_as_floats(count: int, written: str) -> None:
    shown = render(64, prompt_tokens=count)
    assert f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {written}\n' in shown


def test_drafts_that_are_not_verified_are_counted_as_vllm_does(simulator: Any) -> None:
    url = simulator.urls["adaptive"]
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 80, "n": 1}
    drafts = httpx.post(f"{url}/v1/chat/completions", json=body).json()["metrics"]["speculative_decoding"]
    after = values(httpx.get(f"{url}/metrics").text)
    assert set(drafts["per_step_drafted"]) == {7}
    assert after["vllm:spec_decode_num_draft_tokens_total"] == 7 * after["vllm:spec_decode_num_drafts_total"]
    assert after["vllm:spec_decode_num_accepted_tokens_total"] == drafts["num_accepted_draft_tokens"] > 0


def test_counters_agree_with_the_answers(simulator: Any) -> None:
    url = simulator.urls["lookup"]
    before = values(httpx.get(f"{url}/metrics").text)
    bodies = [
        httpx.post(
            f"{url}/v1/chat/completions",
            json={"messages": HELLO, "temperature": 0, "max_tokens": tokens, "n": 1},
        ).json()
        for tokens in (1, 30, 60)
    ]
    after = values(httpx.get(f"{url}/metrics").text)

    def increase(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    usages = [body["usage"] for body in bodies]
    drafts = [body["metrics"]["speculative_decoding"] for body in bodies]
    assert increase("vllm:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert increase("vllm:generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages) == 91
    assert increase("vllm:request_success_total[('finished_reason', 'length')]") == 3
    assert increase("vllm:prefix_cache_queries_total") == increase("vllm:prompt_tokens_total")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert increase("vllm:prefix_cache_hits_total") == cached > 0
    assert increase("vllm:spec_decode_num_drafts_total") == sum(draft["num_spec_steps"] for draft in drafts)
    assert increase("vllm:spec_decode_num_draft_tokens_total") == sum(draft["num_draft_tokens"] for draft in drafts)
    accepted = sum(draft["num_accepted_draft_tokens"] for draft in drafts)
    assert increase("vllm:spec_decode_num_accepted_tokens_total") == accepted > 0
    assert increase("vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert increase("vllm:time_to_first_token_seconds_count") == 3
    ttft_ms = sum(body["metrics"]["time_to_first_token_ms"] for body in bodies)
    assert math.isclose(increase("vllm:time_to_first_token_seconds_sum"), ttft_ms / 1e3, rel_tol=1e-6)
    steps_after_the_first = 91 - accepted - 3
    assert increase("vllm:inter_token_latency_seconds_count") == steps_after_the_first
    labels = [("handler", "/v1/chat/completions"), ("method", "POST"), ("status", "2xx")]
    assert increase(f"http_requests_total{labels}") == 3
