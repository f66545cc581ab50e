"""A replica's metrics that a gateway or its operator reads, with vLLM's names and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backends.backend import EngineLoad
from backends.drafting.script import BLOCK_TOKENS
from backends.simulator.engine.step import Counters

_ENGINE, _LABELS = "0", ("engine", "model_name")
_FINISH_REASONS = ("stop", "length", "abort")
# vLLM's buckets.
_TO_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Tallies:
    """The server's counters; the engine has its own."""

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            about = f"Histogram of {about} in seconds."
            made = Histogram(f"vllm:{name}_seconds", about, _LABELS, registry=registry, buckets=buckets)
            return made.labels(_ENGINE, model_name)

        self.time_to_first_token = histogram("time_to_first_token", "time to first token", _TO_FIRST_TOKEN_S)
        self.inter_token_latency = histogram("inter_token_latency", "inter-token latency", _INTER_TOKEN_S)
        self.e2e_latency = histogram("e2e_request_latency", "e2e request latency", _REQUEST_S)
        finished = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        self.finished = {reason: finished.labels(_ENGINE, model_name, reason) for reason in _FINISH_REASONS}


class EngineCollector(Collector):
    """An engine's gauges and counters."""

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        counters: Callable[[], Counters],
        model_name: str,
        *,
        speculating: bool,
        kv_blocks: int,
    ) -> None:
        self._load = load
        self._counters = counters
        self._labels = {"engine": _ENGINE, "model_name": model_name}
        self._speculating = speculating  # a baseline has no speculation counters
        self._cache = {
            "engine": _ENGINE,
            "block_size": str(BLOCK_TOKENS),
            "num_gpu_blocks": str(kv_blocks),
            "kv_cache_size_tokens": str(kv_blocks * BLOCK_TOKENS),
            "enable_prefix_caching": "True",
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        load, counters = self._load(), self._counters()
        for name, about, gauge in (
            ("num_requests_running", "Number of requests in model execution batches.", load.running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", load.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", load.kv_usage),
        ):
            yield self._sample(GaugeMetricFamily(f"vllm:{name}", about), gauge)
        cache = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig")
        cache.add_sample(cache.name, self._cache, 1)
        yield cache
        queries = "Prefix cache queries, in terms of number of queried tokens."
        totals = [
            ("prefix_cache_queries", queries, counters.prefix_queries),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", counters.prefix_hits),
            ("num_preemptions", "Cumulative number of preemption from the engine.", counters.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", counters.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", counters.generation_tokens),
        ]
        if self._speculating:
            totals += [
                ("spec_decode_num_drafts", "Number of spec decoding drafts.", counters.drafts),
                ("spec_decode_num_draft_tokens", "Number of draft tokens.", counters.draft_tokens),
                ("spec_decode_num_accepted_tokens", "Number of accepted tokens.", counters.accepted_tokens),
            ]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            by_position = CounterMetricFamily(name, "Accepted tokens per draft position.")
            for position, accepted in enumerate(counters.accepted_at.tolist()):
                by_position.add_sample(f"{name}_total", self._labels | {"position": str(position)}, accepted)
            yield by_position
        for name, about, total in totals:
            yield self._sample(CounterMetricFamily(f"vllm:{name}", about), total, "_total")

    def _sample(self, family: Metric, value: float, suffix: str = "") -> Metric:
        family.add_sample(family.name + suffix, self._labels, value)
        return family


def page(registry: CollectorRegistry) -> bytes:
    """Return a replica's metrics page, which starts with the process's metrics."""
    return generate_latest(REGISTRY) + generate_latest(registry)
