"""Parsing of vLLM's metrics page."""

from __future__ import annotations

import pytest

from backends.engine_metrics import read_metrics

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}b"} 3.0
vllm:num_requests_running{engine="1",model_name="a}b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a}b"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a}b",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a}b"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="a}b"} 0.1
vllm:generation_tokens_total{engine="0",model_name="a}b"} 1.2e+06
vllm:generation_tokens_created{engine="0",model_name="a}b"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="a}b"} 7.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="a}b",source="local_compute"} 5.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="a}b"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a}b"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a}b"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b",position="10"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b",position="1"} 59.0
"""


def test_the_values_of_two_engines_are_summed() -> None:
    metrics = read_metrics(PAGE)
    assert metrics is not None
    assert (metrics.running, metrics.waiting, metrics.generation_tokens, metrics.prompt_tokens) == (4, 2, 1_200_000, 7)
    assert metrics.kv_usage == pytest.approx(0.3)
    assert metrics.accepted_per_position == (90, 59, 1)
    assert metrics.acceptance_rate == pytest.approx(0.5)
    assert metrics.acceptance_length == pytest.approx(2.5)


def test_older_series_names_and_crlf_line_ends_are_read() -> None:
    old = PAGE.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc").replace(b"\n", b"\r\n")
    assert read_metrics(old) == read_metrics(PAGE)


def test_values_that_are_not_finite_numbers_are_ignored() -> None:
    metrics = read_metrics(
        b"vllm:num_requests_running 1\nvllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting 1.2.3\n"
    )
    assert metrics is not None
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (1, 0, 0.0)


def test_a_baseline_has_no_acceptance() -> None:
    metrics = read_metrics(b"vllm:num_requests_running 0.0\n")
    assert metrics is not None
    assert metrics.acceptance_rate is None
    assert metrics.acceptance_length is None


@pytest.mark.parametrize("page", [b"", b"<html>", b"python_info 1.0\n", b"\xff\xfe"])
def test_a_page_that_is_not_from_vllm_gives_none(page: bytes) -> None:
    assert read_metrics(page) is None
