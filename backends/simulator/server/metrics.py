"""The counters of a replica, and its `/metrics` page with vLLM's names and labels.

Counters and histograms are plain numbers, because each stream updates them several times a step; the text is rendered
on request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import REGISTRY, generate_latest

from backends.drafting.script import BLOCK_TOKENS

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

Labels = dict[str, str]
Sample = tuple[str, Labels, float]


class Histogram:
    """A Prometheus histogram: counts of values up to each of several bounds.

    Examples
    --------
    >>> histogram = Histogram([1, 10])
    >>> histogram.observe(7.0)
    >>> [value for _, _, value in histogram.samples({})]  # three buckets, the count and the sum
    [0, 1, 1, 1, 7.0]
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, labels: Labels) -> Iterator[Sample]:
        """Yield the cumulative buckets, the count and the sum."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield "_bucket", {**labels, "le": _number(bound)}, total
        yield "_count", labels, total
        yield "_sum", labels, self._sum


def _tokens_up_to(max_model_len: int) -> tuple[int, ...]:
    return tuple(bound for bound in _TOKENS if bound <= max_model_len)


@dataclass(slots=True)
class Tallies:
    """The counters of one replica since its start."""

    max_model_len: int
    since_s: float = field(default_factory=time.time)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    rejected: int = 0
    http_requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    http_durations: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    request_prompt_tokens: Histogram = field(init=False)
    request_generation_tokens: Histogram = field(init=False)
    request_max_generation_tokens: Histogram = field(init=False)
    request_max_tokens: Histogram = field(init=False)
    request_prefill_tokens: Histogram = field(init=False)
    request_n: Histogram = field(default_factory=lambda: Histogram((1, 2, 5, 10, 20)))
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(_ITERATION))
    step_lateness: Histogram = field(default_factory=lambda: Histogram(_LATENESS_S))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_TTFT_S))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(_ITL_S))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(_ITL_S))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(_REQUEST_S))
    queue_time: Histogram = field(default_factory=lambda: Histogram(_REQUEST_S))
    inference_time: Histogram = field(default_factory=lambda: Histogram(_REQUEST_S))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(_REQUEST_S))
    decode_time: Histogram = field(default_factory=lambda: Histogram(_REQUEST_S))

    def __post_init__(self) -> None:
        bounds = _tokens_up_to(self.max_model_len)
        self.request_prompt_tokens = Histogram(bounds)
        self.request_generation_tokens = Histogram(bounds)
        self.request_max_generation_tokens = Histogram(bounds)
        self.request_max_tokens = Histogram(bounds)
        self.request_prefill_tokens = Histogram(bounds)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Count the draft of one request in one step; does nothing if there was none."""
        if drafted:
            self.drafts += 1
            self.draft_tokens += drafted
            self.accepted_tokens += accepted
            for position in range(min(accepted, len(self.accepted_at))):
                self.accepted_at[position] += 1

    def count_http(self, handler: str, method: str, status: int, duration_s: float) -> None:
        """Count an answered HTTP request."""
        self.http_requests[handler, method, f"{status // 100}xx"] += 1
        self.http_durations.setdefault((handler, method), Histogram(_HTTP_S)).observe(duration_s)


@dataclass(frozen=True, slots=True)
class Gauges:
    """The engine's state at the time of a scrape.

    Parameters
    ----------
    cache_queries, cache_hits
        Prompt tokens looked up and found in the prefix cache since the start.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0


def render(tallies: Tallies, gauges: Gauges, model_name: str, *, speculating: bool, kv_blocks: int = 0) -> bytes:
    """Return the metrics page.

    Parameters
    ----------
    kv_blocks
        Number of blocks in the KV cache.
    model_name
        Value of the `model_name` label, which all metrics but the HTTP counters have.
    speculating
        Whether to include the counters of speculation, which a baseline server does not have.
    """
    page = _Page({"engine": "0", "model_name": model_name}, tallies.since_s)
    if speculating:
        _speculation(page, tallies)
    _engine(page, gauges)
    _tokens(page, tallies, gauges)
    _requests(page, tallies)
    config = {
        "block_size": str(BLOCK_TOKENS),
        "num_gpu_blocks": str(kv_blocks),
        "kv_cache_size_tokens": str(kv_blocks * BLOCK_TOKENS),
        "enable_prefix_caching": "True",
    }
    unlabelled = _Page({"engine": "0"}, tallies.since_s)  # metrics that vLLM does not label with the model
    unlabelled.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", [(config, 1.0)])
    _http(unlabelled, tallies)
    return generate_latest(REGISTRY) + page.text() + unlabelled.text()


class _Page:
    """Lines of the Prometheus text format."""

    def __init__(self, labels: Labels, since_s: float) -> None:
        self.labels = labels
        self._since_s = since_s
        self._lines: list[str] = []

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def gauge(self, name: str, about: str, values: Iterable[tuple[Labels, float]]) -> None:
        self._family(name, about, "gauge", [("", {**self.labels, **labels}, value) for labels, value in values])

    def counter(self, name: str, about: str, values: Iterable[tuple[Labels, float]], *, shared: bool = True) -> None:
        common = self.labels if shared else {}
        samples = [("", {**common, **labels}, value) for labels, value in values]
        self._family(f"{name}_total", about, "counter", samples)
        self._family(f"{name}_created", about, "gauge", [("", labels, self._since_s) for _, labels, _ in samples])

    def histogram(self, name: str, about: str, histogram: Histogram) -> None:
        self.histograms(name, about, [(self.labels, histogram)])

    def histograms(self, name: str, about: str, each: Sequence[tuple[Labels, Histogram]]) -> None:
        samples = [sample for labels, histogram in each for sample in histogram.samples(labels)]
        self._family(name, about, "histogram", samples)
        self._family(f"{name}_created", about, "gauge", [("", labels, self._since_s) for labels, _ in each])

    def _family(self, name: str, about: str, kind: str, samples: Iterable[Sample]) -> None:
        self._lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        for suffix, labels, value in samples:
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in sorted(labels.items()))
            self._lines.append(f"{name}{suffix}{{{shown}}} {_number(value)}")


def _number(value: float) -> str:
    """Format a number as Prometheus' client does: as a float, with an exponent from a million on."""
    if value == float("inf"):
        return "+Inf"
    text = repr(float(value))
    point = text.find(".")
    if value > 0 and point > 6:
        digits = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0").rstrip(".")
        return f"{digits}e+{point - 1:02d}"
    return text


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _speculation(page: _Page, tallies: Tallies) -> None:
    page.counter("vllm:spec_decode_num_drafts", "Number of spec decoding drafts.", [({}, tallies.drafts)])
    page.counter("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", [({}, tallies.draft_tokens)])
    page.counter("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens.", [({}, tallies.accepted_tokens)])
    page.counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens per draft position.",
        [({"position": str(position)}, count) for position, count in enumerate(tallies.accepted_at)],
    )


def _engine(page: _Page, gauges: Gauges) -> None:
    page.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", [({}, gauges.running)])
    page.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", [({}, gauges.waiting)])
    page.gauge(
        "vllm:num_requests_waiting_by_reason",
        "Number of waiting requests by reason.",
        [({"reason": "capacity"}, gauges.waiting), ({"reason": "deferred"}, 0)],
    )
    page.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", [({}, gauges.kv_usage)])
    page.counter(
        "vllm:prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        [({}, gauges.cache_queries)],
    )
    page.counter(
        "vllm:prefix_cache_hits",
        "Prefix cache hits, in terms of number of cached tokens.",
        [({}, gauges.cache_hits)],
    )
    page.counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", [({}, gauges.preemptions)])


def _tokens(page: _Page, tallies: Tallies, gauges: Gauges) -> None:
    page.counter("vllm:prompt_tokens", "Number of prefill tokens processed.", [({}, tallies.prompt_tokens)])
    page.counter(
        "vllm:prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        [
            ({"source": "local_compute"}, tallies.prompt_tokens - gauges.cache_hits),
            ({"source": "local_cache_hit"}, gauges.cache_hits),
            ({"source": "external_kv_transfer"}, 0),
        ],
    )
    page.counter(
        "vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", [({}, gauges.cache_hits)]
    )
    page.counter("vllm:generation_tokens", "Number of generation tokens processed.", [({}, tallies.generation_tokens)])
    page.counter(
        "vllm:request_success",
        "Count of successfully processed requests.",
        [
            ({"finished_reason": reason}, tallies.finished[reason])
            for reason in ("stop", "length", "abort", "error", "repetition")
        ],
    )
    labels = {"model_name": page.labels["model_name"]}
    page.counter(
        "vllm:admission_rejections",
        "Number of admission attempts rejected by a queue limit, by reason.",
        [
            ({**labels, "reason": "max_num_queued_reqs"}, tallies.rejected),
            ({**labels, "reason": "max_num_queued_tokens"}, 0),
        ],
        shared=False,
    )


def _requests(page: _Page, tallies: Tallies) -> None:
    for name, about, histogram in (
        ("request_prompt_tokens", "Number of prefill tokens processed.", tallies.request_prompt_tokens),
        ("request_generation_tokens", "Number of generation tokens processed.", tallies.request_generation_tokens),
        ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", tallies.iteration_tokens),
        (
            "request_max_num_generation_tokens",
            "Histogram of maximum number of requested generation tokens.",
            tallies.request_max_generation_tokens,
        ),
        ("request_params_n", "Histogram of the n request parameter.", tallies.request_n),
        ("request_params_max_tokens", "Histogram of the max_tokens request parameter.", tallies.request_max_tokens),
        ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", tallies.time_to_first_token),
        ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", tallies.inter_token_latency),
        (
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            tallies.time_per_output_token,
        ),
        ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", tallies.e2e_latency),
        (
            "request_queue_time_seconds",
            "Histogram of time spent in WAITING phase for request.",
            tallies.queue_time,
        ),
        (
            "request_inference_time_seconds",
            "Histogram of time spent in RUNNING phase for request.",
            tallies.inference_time,
        ),
        (
            "request_prefill_time_seconds",
            "Histogram of time spent in PREFILL phase for request.",
            tallies.prefill_time,
        ),
        ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", tallies.decode_time),
        (
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            tallies.request_prefill_tokens,
        ),
    ):
        page.histogram(f"vllm:{name}", about, histogram)
    about = "Seconds from a step's scheduled end until its last chunk was sent."
    page.histogram("simulator:step_lateness_seconds", about, tallies.step_lateness)


def _http(page: _Page, tallies: Tallies) -> None:
    page.counter(
        "http_requests",
        "Total number of requests by method, status and handler.",
        [
            ({"handler": handler, "method": method, "status": status}, count)
            for (handler, method, status), count in tallies.http_requests.items()
        ],
        shared=False,
    )
    page.histograms(
        "http_request_duration_seconds",
        "Latency with only few buckets by handler.",
        [
            ({"handler": handler, "method": method}, histogram)
            for (handler, method), histogram in tallies.http_durations.items()
        ],
    )
