"""vLLM's metrics page, and what its counters say of drafts between two readings and over the last minute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.engine_metrics import (
    WINDOW_S,
    AcceptanceOfLate,
    CountedAcceptance,
    EngineMetrics,
    MetricsReader,
    read_metrics,
)

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


def read(page: bytes) -> EngineMetrics:
    metrics = read_metrics(page)
    assert metrics is not None
    return metrics


def test_the_values_of_two_engines_are_summed() -> None:
    metrics = read(PAGE)
    assert (metrics.running, metrics.waiting, metrics.generation_tokens, metrics.prompt_tokens) == (4, 2, 1_200_000, 7)
    assert metrics.kv_usage == pytest.approx(0.3)
    assert metrics.accepted_per_position == (90, 59, 1)


@pytest.mark.parametrize(
    "after",
    [
        b" 1795220442000",
        b" 1795220442.07",
        b"\t-1 \r",
        b' # {trace_id="a}b"} 9.0 1.7e9',
        b' 17 # {x="} 8"} 9.0',
        b" # ",
    ],
)
def test_times_and_exemplars_after_a_value_are_no_part_of_it(after: bytes) -> None:
    lines = [each + after if each and not each.startswith(b"#") else each for each in PAGE.split(b"\n")]
    assert read_metrics(b"\n".join(lines)) == read_metrics(PAGE)
    started = b"process_start_time_seconds 17.5"
    assert read(PAGE + started + after + b"\n").started_s == 17.5


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        (b'kv_cache_size_tokens="4096",num_gpu_blocks="100"', 4096),
        (b'kv_cache_size_tokens="None",num_gpu_blocks="100"', 1600),
        (b'num_gpu_blocks="100"', 1600),
        (b'num_gpu_blocks="None",num_gpu_blocks_override="7"', 0),
    ],
)
def test_the_size_of_the_kv_cache_is_read_from_its_labels(labels: bytes, tokens: int) -> None:
    page = PAGE + b"".join(
        b'vllm:cache_config_info{block_size="16",engine="%d",%s} 1.0\n' % (i, labels) for i in (0, 1)
    )
    assert read(page).kv_tokens == 2 * tokens


LIFE = b"""# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="False",engine="0"} 1.0
vllm:sleep_mode_operation_duration_seconds_bucket{le="1.0",operation="wake"} 2.0
vllm:sleep_mode_operation_duration_seconds_count{operation="wake"} 2.0
vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 3.0
vllm:rl_weight_update_operation_duration_seconds_count{operation="start"} 1.0
vllm:rl_weight_update_operation_duration_seconds_count{operation="finish"} 1.0
"""


def test_what_an_engine_went_through_is_read() -> None:
    metrics, silent = read(PAGE + LIFE), read(PAGE)
    assert (metrics.started_s, metrics.awake, metrics.wake_ups, metrics.reloads) == (1.7e9, 1, 2, 2)
    assert metrics.prefix_caching == 0
    assert (silent.started_s, silent.awake, silent.prefix_caching) == (0.0, None, None)


@pytest.mark.parametrize(
    ("page", "speculates"),
    [
        (PAGE, True),
        (b"vllm:num_requests_running 0.0\nvllm:kv_cache_usage_perc 0.0\n", False),
        (b"vllm:num_requests_running 0.0\nvllm:gpu_cache_usage_perc 0.0\n", None),  # from before it counted drafts
    ],
)
def test_whether_an_engine_speculates_is_told_by_its_series(page: bytes, speculates: bool | None) -> None:
    for lines in (page, b"\n".join(reversed(page.splitlines())) + b"\n"):
        assert read(lines).speculates is speculates


@pytest.mark.parametrize("series", [b"inter_token_latency_seconds", b"time_per_output_token_seconds", b""])
def test_steps_of_sequences_are_counted_by_two_histograms(series: bytes) -> None:
    page = PAGE + b"vllm:time_to_first_token_seconds_count 32.0\nvllm:time_to_first_token_seconds_sum 7.5\n"
    if series:
        page += b'vllm:%s_bucket{le="+Inf"} 3745.0\nvllm:%s_count 3745.0\n' % (series, series)
    assert read(page).steps == (3777 if series else None)


@pytest.mark.parametrize("text", [b"1e308", b"-1", b"1e400", b"+Inf", b"1000001"])
def test_a_load_that_cannot_be_is_ignored_and_said(text: bytes) -> None:
    page = PAGE.replace(b"} 2.0", b"} " + text)
    metrics = read(page)
    assert (metrics.running, metrics.waiting, metrics.ignored) == (4, 0, ("waiting",))


def test_what_no_number_is_plausible_for_is_bounded() -> None:
    digits = b"9" * 5000
    page = b"""vllm:num_requests_running 1
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="%b"} 4.0
vllm:generation_tokens_total %b
vllm:kv_cache_usage_perc 1e9
vllm:cache_config_info{,num_gpu_blocks="%b",block_size="9"} 1.0
""" % (digits, digits, digits)
    assert read_metrics(page) == EngineMetrics(running=1, prefix_caching=0, ignored=("kv_usage",))


NUMBERS = st.sampled_from((b"1e308", b"-1e308", b"1e400", b"NaN", b"-Inf", b"7", b"0.5", b"1.2.3", b"9" * 400))
SERIES = st.sampled_from(tuple(line.rpartition(b" ")[0] for line in PAGE.splitlines() if line.startswith(b"vllm")))
PAGES = st.lists(st.tuples(SERIES, NUMBERS).map(b" ".join), max_size=12).map(b"\n".join)


@given(PAGES, st.integers(1, 40))
def test_any_page_read_in_parts_is_the_page_read_at_once_and_finite(page: bytes, size: int) -> None:
    reader = MetricsReader()
    for start in range(0, len(page), size):
        reader.feed(page[start : start + size])
    metrics = reader.metrics()
    assert metrics == read_metrics(page)
    if metrics is not None:
        assert 0 <= metrics.running + metrics.waiting <= 2_000_000
        assert 0.0 <= metrics.kv_usage <= 1.0
        assert all(0 <= count <= 2**53 for count in (metrics.generation_tokens, *metrics.accepted_per_position))


NGRAM = EngineMetrics(
    generation_tokens=5244, drafts=581, draft_tokens=2801, accepted_tokens=1714, first_steps=24, later_steps=3519
)
BASELINE = EngineMetrics(generation_tokens=6844, first_steps=32, later_steps=6812)


def counted(before: EngineMetrics, after: EngineMetrics) -> CountedAcceptance:
    found = CountedAcceptance.between(before, after)
    assert found is not None
    return found


def test_steps_that_drafted_nothing_count_with_and_without_a_count_of_steps() -> None:
    nothing: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    found = counted(replace(NGRAM, **nothing), NGRAM)
    assert found.tokens_per_step == pytest.approx(5244 / 3543)
    assert found.rate == pytest.approx(1714 / 2801)
    older = replace(NGRAM, later_steps=None)
    assert counted(EngineMetrics(), older).tokens_per_step == pytest.approx(5244 / (5244 - 1714))
    assert CountedAcceptance.between(EngineMetrics(later_steps=0), BASELINE) == CountedAcceptance(1.0, None, ())


COUNTS = ("generation_tokens", "drafts", "draft_tokens", "accepted_tokens", "first_steps", "later_steps")


def test_positions_that_an_engine_reports_later_count_from_zero() -> None:
    before = EngineMetrics(
        generation_tokens=30, drafts=10, draft_tokens=10, accepted_tokens=5, accepted_per_position=(5,)
    )
    after = EngineMetrics(
        generation_tokens=60, drafts=20, draft_tokens=40, accepted_tokens=18, accepted_per_position=(13, 3, 2)
    )
    assert counted(before, after).by_position == (0.8, 0.3, 0.2)


def test_an_engine_without_output_or_counters_has_none() -> None:
    assert CountedAcceptance.between(EngineMetrics(), EngineMetrics()) is None
    assert CountedAcceptance.between(None, EngineMetrics(generation_tokens=3)) is None


def test_only_the_last_minute_counts() -> None:
    of_late = AcceptanceOfLate()
    assert of_late.at(0.0) is None
    for at_s, tokens, accepted in [(0.0, 0, 0), (1.0, 100, 50), (100.0, 200, 50), (130.0, 300, 50)]:
        of_late.add(EngineMetrics(generation_tokens=tokens, accepted_tokens=accepted), at_s)
    found = of_late.at(131.0)
    assert found is not None
    assert found.tokens_per_step == 1.0
    assert of_late.at(131.0 + WINDOW_S) is None
