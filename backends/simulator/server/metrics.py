"""The counters of a replica, and its `/metrics` page with vLLM's names and labels.

Counters and histograms are plain numbers, because each stream updates them several times a step. On request they are
copied, and a thread writes the page, which takes ten times as long as a step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from backends.backend import EngineLoad
from backends.drafting.script import BLOCK_TOKENS
from backends.simulator.engine.step import Counters

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_LATENESS_S = (0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)  # fmt: skip
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_HTTP_S = (0.1, 0.5, 1.0)
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

Labels = dict[str, str]


class Histogram:
    """A Prometheus histogram: counts of values up to each of several bounds.

    Examples
    --------
    >>> histogram = Histogram("tokens", "Tokens of a request.", (1, 10))
    >>> histogram.observe(7.0)
    >>> histogram.buckets(), histogram.sum
    ([('1.0', 0), ('10.0', 1), ('+Inf', 1)], 7.0)
    """

    __slots__ = ("_bounds", "_counts", "about", "name", "sum")

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.about = about
        self.sum = 0.0
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)

    def observe(self, value: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, int]]:
        """Return the number of values up to each bound."""
        return list(zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True))


class Tallies:
    """What a replica's server has counted since its start; the engine has counters of its own."""

    def __init__(self, max_model_len: int) -> None:
        tokens = [bound for bound in _TOKENS if bound <= max_model_len]
        self.since_s = time.time()
        self.finished: Counter[str] = Counter()
        self.rejected = 0
        self.http_requests: Counter[tuple[str, str, str]] = Counter()
        self.http_durations: dict[tuple[str, str], Histogram] = {}
        self.request_prompt_tokens = Histogram(
            "vllm:request_prompt_tokens", "Number of prefill tokens processed.", tokens
        )
        self.request_generation_tokens = Histogram(
            "vllm:request_generation_tokens", "Number of generation tokens processed.", tokens
        )
        self.iteration_tokens = Histogram(
            "vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", _ITERATION
        )
        self.request_max_generation_tokens = Histogram(
            "vllm:request_max_num_generation_tokens",
            "Histogram of maximum number of requested generation tokens.",
            tokens,
        )
        self.request_n = Histogram("vllm:request_params_n", "Histogram of the n request parameter.", (1, 2, 5, 10, 20))
        self.request_max_tokens = Histogram(
            "vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", tokens
        )
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT_S
        )
        self.inter_token_latency = Histogram(
            "vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _ITL_S
        )
        self.time_per_output_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            _ITL_S,
        )
        self.e2e_latency = Histogram(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _REQUEST_S
        )
        self.queue_time = Histogram(
            "vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _REQUEST_S
        )
        self.inference_time = Histogram(
            "vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", _REQUEST_S
        )
        self.prefill_time = Histogram(
            "vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", _REQUEST_S
        )
        self.decode_time = Histogram(
            "vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", _REQUEST_S
        )
        self.request_prefill_tokens = Histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            tokens,
        )
        self.step_lateness = Histogram(
            "simulator:step_lateness_seconds",
            "Seconds from a step's scheduled end until its last chunk was sent.",
            _LATENESS_S,
        )

    def count_http(self, handler: str, method: str, status: int, duration_s: float) -> None:
        """Count an answered HTTP request."""
        self.http_requests[handler, method, f"{status // 100}xx"] += 1
        if (handler, method) not in self.http_durations:
            name, about = "http_request_duration_seconds", "Latency with only few buckets by handler."
            self.http_durations[handler, method] = Histogram(name, about, _HTTP_S)
        self.http_durations[handler, method].observe(duration_s)


class ReplicaMetrics:
    """The metrics of a replica."""

    def __init__(
        self,
        tallies: Tallies,
        load: Callable[[], EngineLoad],
        counters: Callable[[], Counters],
        model_name: str,
        *,
        speculating: bool,
        kv_blocks: int = 0,
    ) -> None:
        self._tallies = tallies
        self._load = load  # functions that return the engine's current load and counters
        self._engine_counters = counters
        self._labels = {"engine": "0", "model_name": model_name}
        # Whether to include the counters of speculation, which a baseline server does not have.
        self._speculating = speculating
        self._cache = {
            "engine": "0",
            "block_size": str(BLOCK_TOKENS),
            "num_gpu_blocks": str(kv_blocks),
            "kv_cache_size_tokens": str(kv_blocks * BLOCK_TOKENS),
            "enable_prefix_caching": "True",
        }

    def families(self) -> list[Metric]:
        """Return the current metrics."""
        return [*self._of_engine(), *self._of_server()]

    def _of_engine(self) -> Iterator[Metric]:
        load, counters = self._load(), self._engine_counters()
        if self._speculating:
            yield from self._counters(
                ("spec_decode_num_drafts", "Number of spec decoding drafts.", counters.drafts),
                ("spec_decode_num_draft_tokens", "Number of draft tokens.", counters.draft_tokens),
                ("spec_decode_num_accepted_tokens", "Number of accepted tokens.", counters.accepted_tokens),
            )
            accepted_at = {str(position): count for position, count in enumerate(counters.accepted_at.tolist())}
            about = "Accepted tokens per draft position."
            yield self._split("spec_decode_num_accepted_tokens_per_pos", about, "position", accepted_at)
        for name, about, value in (
            ("num_requests_running", "Number of requests in model execution batches.", load.running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", load.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", load.kv_usage),
        ):
            yield _gauge(f"vllm:{name}", about, (self._labels, value))
        waiting = {"capacity": load.waiting, "deferred": 0}
        yield _gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            *((self._labels | {"reason": reason}, count) for reason, count in waiting.items()),
        )
        yield _gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", (self._cache, 1))
        queries, hits = counters.prefix_queries, counters.prefix_hits
        yield from self._counters(
            ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", queries),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", hits),
            ("num_preemptions", "Cumulative number of preemption from the engine.", counters.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", counters.prompt_tokens),
            ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", hits),
            ("generation_tokens", "Number of generation tokens processed.", counters.generation_tokens),
        )
        sources = {"local_compute": queries - hits, "local_cache_hit": hits, "external_kv_transfer": 0}
        yield self._split("prompt_tokens_by_source", "Number of prompt tokens by source.", "source", sources)

    def _of_server(self) -> Iterator[Metric]:
        tallies = self._tallies
        finished = {reason: tallies.finished[reason] for reason in _FINISH_REASONS}
        about = "Count of successfully processed requests."
        yield self._split("request_success", about, "finished_reason", finished)
        rejected = {"max_num_queued_reqs": tallies.rejected, "max_num_queued_tokens": 0}
        model = {"model_name": self._labels["model_name"]}
        yield self._counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            *((model | {"reason": reason}, count) for reason, count in rejected.items()),
        )
        for histogram in vars(tallies).values():
            if isinstance(histogram, Histogram):
                yield self._histogram((self._labels, histogram))
        labels = ("handler", "method", "status")
        yield self._counter(
            "http_requests",
            "Total number of requests by method, status and handler.",
            *((dict(zip(labels, key, strict=True)), count) for key, count in tallies.http_requests.items()),
        )
        if tallies.http_durations:
            yield self._histogram(
                *((dict(zip(labels, key, strict=False)), each) for key, each in tallies.http_durations.items())
            )

    def _counters(self, *rows: tuple[str, str, float]) -> Iterator[Metric]:
        for name, about, value in rows:
            yield self._counter(f"vllm:{name}", about, (self._labels, value))

    def _split(self, name: str, about: str, label: str, values: dict[str, int]) -> Metric:
        """Return a counter with one value for each value of a label."""
        samples = ((self._labels | {label: key}, value) for key, value in values.items())
        return self._counter(f"vllm:{name}", about, *samples)

    def _counter(self, name: str, about: str, *samples: tuple[Labels, float]) -> Metric:
        family = CounterMetricFamily(name, about)
        for labels, value in samples:
            family.add_sample(f"{name}_total", labels, value)
            family.add_sample(f"{name}_created", labels, self._tallies.since_s)
        return family

    def _histogram(self, *samples: tuple[Labels, Histogram]) -> Metric:
        name = samples[0][1].name
        family = HistogramMetricFamily(name, samples[0][1].about)
        for labels, histogram in samples:
            buckets = histogram.buckets()
            for bound, count in buckets:
                family.add_sample(f"{name}_bucket", labels | {"le": bound}, count)
            family.add_sample(f"{name}_count", labels, buckets[-1][1])
            family.add_sample(f"{name}_sum", labels, histogram.sum)
            family.add_sample(f"{name}_created", labels, self._tallies.since_s)
        return family


class _Families(Collector):
    """Metrics that have been collected."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return the metrics."""
        return self._families


def page(families: list[Metric]) -> bytes:
    """Return the metrics page of a replica, which begins with the metrics of the process."""
    return generate_latest(REGISTRY) + generate_latest(_Families(families))


def _gauge(name: str, about: str, *samples: tuple[Labels, float]) -> Metric:
    family = GaugeMetricFamily(name, about)
    for labels, value in samples:
        family.add_sample(name, labels, value)
    return family
