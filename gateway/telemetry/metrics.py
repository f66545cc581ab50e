"""The Prometheus metrics `gateway_...`, all with bounded label values.

With one worker the values live in the process. With several, `PROMETHEUS_MULTIPROC_DIR` is set before this module is
imported, the workers keep the values in files there, and each worker can serve the page of all. Updates on the request
path get there with `refresh` (see `series`): the page is exact for the worker that serves it, and at most half a second
old for the others.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from backends.backend import Backend, State
from backends.engine_metrics import EngineMetrics
from gateway.telemetry.series import Count, Counts, Distribution, Distributions, forget_series

_BACKEND = ("model", "backend", "method")
_STORE = ("store",)
OUTCOMES = ("ok", "client_error", "engine_error", "unanswered", "interrupted", "cancelled")
DRAFTER_CAUSES = ("since_restart", "since_wake_up", "since_reload", "unknown")
"""What a replica went through when its drafter fell silent."""
_LATENCY_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEP_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.045, 0.07, 0.1, 0.2, 0.5, 1.0, 3.0)
_SYNC_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_AGE_S = (0.02, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.5, 1.0, 3.0)
_OVERHEAD_S = (2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.2, 1.0)
_OfWorkers = Literal["livemostrecent", "livesum", "livemin", "livemax"]
"""How a gauge is aggregated over workers: most recent value, sum, minimum or maximum."""
_TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0)
_TEMPERATURE_LABELS = ("0", "0-0.3", "0.3-0.5", "0.5-0.7", "0.7-1", "1+")


def temperature_bucket(temperature: float) -> str:
    """Return the label of a temperature: `0`, `0-0.3`, ... `0.7-1`, `1+`; bounds belong to the lower bucket.

    Examples
    --------
    >>> [temperature_bucket(temperature) for temperature in (0.0, 0.3, 0.8, 2.0)]
    ['0', '0-0.3', '0.7-1', '1+']
    """
    return _TEMPERATURE_LABELS[bisect_left(_TEMPERATURES, temperature)]


@dataclass(slots=True)
class BackendMetrics:
    """The series of one backend."""

    labels: tuple[str, str, str]
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    queue: Distribution
    prompt_tokens: Count
    output_tokens: Count
    outcomes: dict[str, Count]


@dataclass(slots=True)
class StateMetrics:
    """The series of the state store; errors by kind."""

    connected: Gauge
    last_sync: Gauge
    sync: Distribution
    pushed: Count
    read: Count
    errors: dict[str, Count]


@dataclass(slots=True)
class PeerMetrics:
    """The series of the exchange with other processes of the pool; errors by kind."""

    peers: Gauge
    age: Distribution | None
    errors: dict[str, Count]


class Metrics:
    """All metrics of the gateway."""

    def __init__(self) -> None:  # noqa: PLR0915 -- a list of series
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a third series for each counter and histogram
        self.registry = CollectorRegistry()
        many = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        registry = None if many else self.registry
        if many:
            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]

        self._summed: list[Counts | Distributions] = []
        self._gauges: list[Gauge] = []
        self._present: frozenset[tuple[str, str]] | None = None  # with several workers, once a replica has left
        self._is_shared = many

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counts:
            counts = Counts(Counter(name, text, labels, registry=registry))
            self._summed.append(counts)
            return counts

        def histogram(name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Distributions:
            distributions = Distributions(Histogram(name, text, labels, buckets=bounds, registry=registry), bounds)
            self._summed.append(distributions)
            return distributions

        def gauge(name: str, text: str, labels: tuple[str, ...], workers: _OfWorkers = "livemostrecent") -> Gauge:
            made = Gauge(name, text, labels, registry=registry, multiprocess_mode=workers)
            self._gauges.append(made)
            return made

        self.requests = counter("gateway_requests", "Requests ended, by outcome", (*_BACKEND, "outcome"))
        self.ttft = histogram(
            "gateway_ttft_seconds", "Arrival to first chunk of the answer (streams)", _BACKEND, _LATENCY_S
        )
        self.itl = histogram(
            "gateway_itl_seconds",
            "Time between two chunks of a stream; one chunk is one engine step",
            _BACKEND,
            _STEP_S,
        )
        self.tpot = histogram("gateway_tpot_seconds", "Time per output token after the first", _BACKEND, _STEP_S)
        self.e2e = histogram("gateway_e2e_seconds", "Arrival to the end of the answer", _BACKEND, _LATENCY_S)
        self.queue = histogram(
            "gateway_queue_seconds", "Waiting in the engine, if it reports that", _BACKEND, _LATENCY_S
        )
        self.overhead = histogram(
            "gateway_overhead_seconds",
            "From the last byte of a request to its sending to a backend",
            ("model",),
            _OVERHEAD_S,
        )
        self.prompt_tokens = counter("gateway_prompt_tokens", "Prompt tokens", _BACKEND)
        self.output_tokens = counter("gateway_output_tokens", "Output tokens", _BACKEND)
        self.steps = counter("gateway_steps", "Engine steps that emitted tokens", (*_BACKEND, "temperature", "source"))
        self.step_tokens = counter(
            "gateway_step_tokens", "Tokens that these steps emitted", (*_BACKEND, "temperature", "source")
        )
        self.drafted = counter("gateway_drafted_tokens", "Tokens drafted", (*_BACKEND, "temperature"))
        self.accepted = counter("gateway_accepted_tokens", "Drafted tokens accepted", (*_BACKEND, "temperature"))
        self.decisions = counter("gateway_decisions", "Decisions, by reason", ("model", "policy", "reason"))
        self.policy_errors = counter("gateway_policy_errors", "Errors raised by the policy", ("model", "call"))
        self.retries = counter("gateway_retries", "Requests sent to another backend", (*_BACKEND, "kind"))
        self.retries_refused = counter(
            "gateway_retries_refused",
            "Requests not sent elsewhere: the retry budget is spent",
            ("model",),
        )
        self.rescues = counter(
            "gateway_rescues", "Streams broken off at this backend, by what came of them", (*_BACKEND, "outcome")
        )
        self.queue_length = gauge("gateway_queue_length", "Requests waiting in the gateway", ("model",), "livesum")
        self.queue_wait = histogram(
            "gateway_queue_wait_seconds",
            "Waiting in the gateway, of requests then sent",
            ("model",),
            _LATENCY_S,
        )
        self.queue_refused = counter(
            "gateway_queue_refused", "Requests that left the queue of the gateway unsent", ("model", "reason")
        )
        self.keys = counter("gateway_key_tokens", "Prompt and output tokens by key", ("key",))
        self.recorded = counter("gateway_recorder_records", "Requests selected for recording", ("result",))
        self.recorded_bytes = counter("gateway_recorder_bytes", "Bytes in the recorder's files", ("text",))
        self.recorder_queue = gauge("gateway_recorder_queue", "Requests waiting to be recorded", ("text",), "livesum")
        self.shadow = counter(
            "gateway_shadow_texts", "Finished texts selected for shadow drafting", ("model", "result")
        )
        self.shadow_cpu = counter("gateway_shadow_cpu_seconds", "CPU time of shadow drafting", ("model",))
        self.in_flight = gauge("gateway_in_flight", "Requests in flight", _BACKEND, "livesum")
        self.up = gauge("gateway_backend_up", "1 if the backend may be sent requests", _BACKEND)
        self.state = gauge("gateway_backend_state", "1 for the state that the backend is in", (*_BACKEND, "state"))
        self.simulated = gauge("gateway_backend_simulated", "1 if the backend is simulated", _BACKEND)
        self.running = gauge("gateway_backend_running", "Requests in the engine's batch, as it reports", _BACKEND)
        self.waiting = gauge("gateway_backend_waiting", "Requests waiting in the engine, as it reports", _BACKEND)
        self.kv_usage = gauge(
            "gateway_backend_kv_usage_ratio", "Share of the KV cache in use, as the engine reports", _BACKEND
        )
        self.acceptance = gauge(
            "gateway_backend_acceptance_ratio", "Accepted / drafted tokens since the engine started", _BACKEND
        )
        self.acceptance_length = gauge(
            "gateway_backend_acceptance_length",
            "Accepted tokens per step with a draft, + 1, since the engine started",
            _BACKEND,
        )
        self.frozen = gauge("gateway_policy_frozen", "1 if the policy has frozen itself", ("model",), "livemax")
        self.ratio = gauge(
            "gateway_policy_ratio_to_least_loaded", "Time per unit of work: policy / least_loaded", ("model",)
        )
        self.outlier_ejected = gauge(
            "gateway_backend_outlier_ejected",
            "1 if the policy has ejected the backend as an outlier",
            ("model", "backend"),
            "livemax",
        )
        self.drafter_silent = gauge(
            "gateway_backend_drafter_silent",
            "1 if the drafter of the backend gives nothing where its method should, by when it fell silent",
            (*_BACKEND, "cause"),
            "livemax",
        )
        self.state_connected = gauge("gateway_state_connected", "1 if the state store is reachable", _STORE, "livemin")
        self.state_last_sync = gauge(
            "gateway_state_last_sync_timestamp_seconds",
            "Time of the last synchronization with the state store",
            _STORE,
            "livemin",
        )
        self.state_sync = histogram(
            "gateway_state_sync_seconds", "Duration of a synchronization with the state store", _STORE, _SYNC_S
        )
        self.state_rows = counter(
            "gateway_state_rows", "Rows of statistics exchanged with the state store", (*_STORE, "direction")
        )
        self.state_errors = counter("gateway_state_errors", "Errors of the state store", (*_STORE, "kind"))
        self.discoveries = counter(
            "gateway_discoveries", "Answers of a source of replicas, by outcome", ("model", "source", "outcome")
        )
        self.discovered = gauge("gateway_discovered_backends", "Replicas that a source has found", ("model", "source"))
        self.peers = gauge("gateway_peers", "Other processes of the pool whose requests are known", (), "livemin")
        self.peers_age = histogram(
            "gateway_peers_exchange_interval_seconds", "Time between two exchanges with other gateways", _STORE, _AGE_S
        )
        self.peers_errors = counter(
            "gateway_peers_errors", "Errors of the exchange with other gateways", (*_STORE, "kind")
        )
        self.reloads = counter("gateway_reloads", "Reloads of the pool file, by outcome", ("cause", "outcome"))
        self.last_reload = gauge(
            "gateway_last_reload_timestamp_seconds",
            "Time of the last successful reload of the pool file",
            ("cause",),
            "livemax",
        )

    def bind(self, backend: Backend) -> BackendMetrics:
        """Return a backend's series; call once per backend, since the lookup by labels costs more than an update."""
        labels = (backend.model, backend.name, backend.method.value)
        return BackendMetrics(
            labels,
            ttft=self.ttft.labels(*labels),
            itl=self.itl.labels(*labels),
            tpot=self.tpot.labels(*labels),
            e2e=self.e2e.labels(*labels),
            queue=self.queue.labels(*labels),
            prompt_tokens=self.prompt_tokens.labels(*labels),
            output_tokens=self.output_tokens.labels(*labels),
            # Created at once: the rate of a series that appears with its first event misses that event.
            outcomes={outcome: self.requests.labels(*labels, outcome) for outcome in OUTCOMES},
        )

    def bind_state(self, store: str, kinds: Iterable[str]) -> StateMetrics:
        """Return the series of a state store.

        Parameters
        ----------
        store
            Kind of the store, its label.
        kinds
            Kinds of its errors.
        """
        return StateMetrics(
            self.state_connected.labels(store),
            self.state_last_sync.labels(store),
            self.state_sync.labels(store),
            self.state_rows.labels(store, "pushed"),
            self.state_rows.labels(store, "read"),
            {kind: self.state_errors.labels(store, kind) for kind in kinds},
        )

    def bind_peers(self, store: str | None, kinds: Iterable[str]) -> PeerMetrics:
        """Return the series of the exchange through a store, as in `bind_state`; None for that of workers alone."""
        if store is None:
            return PeerMetrics(self.peers, None, {})
        errors = {kind: self.peers_errors.labels(store, kind) for kind in kinds}
        return PeerMetrics(self.peers, self.peers_age.labels(store), errors)

    def count_refusal(self) -> None:
        """Count a request refused before routing: invalid, without a valid key, or over a limit."""
        self.requests.labels("", "", "", "refused").inc()

    def count_discovery(self, model: str, source: str, outcome: str, replicas: int) -> None:
        """Count an answer of a source of replicas, and set the number of those that it has found."""
        self.discoveries.labels(model, source, outcome).inc()
        self.discovered.labels(model, source).set(replicas)

    def count_reload(self, cause: str, outcome: str) -> None:
        """Count a reload of the pool file."""
        self.reloads.labels(cause, outcome).inc()
        if outcome in {"changed", "unchanged"}:
            self.last_reload.labels(cause).set(time.time())

    def count_steps(self, bound: BackendMetrics, temperature: float, source: str, steps: float, tokens: float) -> None:
        """Count the engine steps of a request and the tokens they emitted; `source` is `engine` or `chunks`."""
        bucket = temperature_bucket(temperature)
        self.steps.labels(*bound.labels, bucket, source).inc(steps)
        self.step_tokens.labels(*bound.labels, bucket, source).inc(tokens)

    def count_drafts(self, bound: BackendMetrics, temperature: float, drafted: int, accepted: int) -> None:
        """Count the drafted and accepted tokens of a request, as its engine reported them."""
        bucket = temperature_bucket(temperature)
        self.drafted.labels(*bound.labels, bucket).inc(drafted)
        self.accepted.labels(*bound.labels, bucket).inc(accepted)

    def flush(self) -> None:
        """Add counted updates to `prometheus_client`, for `render` in any process; runs on the event loop."""
        for series in self._summed:
            series.flush()

    def refresh(self, backends: Iterable[tuple[Backend, EngineMetrics | None]]) -> None:
        """Update the gauges of the backends, and flush; called twice a second and on each scrape."""
        self.flush()
        for backend, engine in backends:
            labels = (backend.model, backend.name, backend.method.value)
            self.in_flight.labels(*labels).set(backend.in_flight)
            self.up.labels(*labels).set(backend.state in {State.UP, State.RECOVERING})
            for state in State:
                self.state.labels(*labels, state.value).set(backend.state is state)
            self.simulated.labels(*labels).set(backend.simulated)
            self.running.labels(*labels).set(backend.load.running)
            self.waiting.labels(*labels).set(backend.load.waiting)
            self.kv_usage.labels(*labels).set(backend.load.kv_usage)
            if engine is not None and engine.acceptance_rate is not None:
                self.acceptance.labels(*labels).set(engine.acceptance_rate)
            if engine is not None and engine.acceptance_length is not None:
                self.acceptance_length.labels(*labels).set(engine.acceptance_length)

    def refresh_policy(self, model: str, frozen: bool, ratio: float, ejected: Mapping[str, bool]) -> None:
        """Update the gauges of a learned policy.

        Parameters
        ----------
        ratio
            Time per unit of work, relative to least_loaded; NaN if unknown.
        ejected
            Whether each backend is ejected as an outlier, by name.
        """
        self.frozen.labels(model).set(frozen)
        if not math.isnan(ratio):
            self.ratio.labels(model).set(ratio)
        for backend, is_ejected in ejected.items():
            self.outlier_ejected.labels(model, backend).set(is_ejected)

    def refresh_drafters(self, silent: Iterable[tuple[Backend, str]]) -> None:
        """Update the gauges of drafters.

        Parameters
        ----------
        silent
            Each backend that is watched, with one of `DRAFTER_CAUSES` if its drafter is silent, else an empty text.
        """
        for backend, present in silent:
            labels = (backend.model, backend.name, backend.method.value)
            for cause in DRAFTER_CAUSES:
                self.drafter_silent.labels(*labels, cause).set(cause == present)

    def forget(self, **labels: str) -> None:
        """Remove the series with these label values: of a model, a backend or a key that is gone."""
        for series in self._summed:
            series.forget(labels)
        for gauge in self._gauges:
            forget_series(gauge, labels)

    def set_present(self, backends: Iterable[Backend]) -> None:
        """Set the backends to show with several workers, whose common files keep the series of those that are gone."""
        self._present = frozenset((backend.model, backend.name) for backend in backends)

    def refresh_queue(self, model: str, waiting: int, refused: dict[str, int]) -> None:
        """Update the series of a queue, and take over what it has refused, by reason."""
        self.queue_length.labels(model).set(waiting)
        for reason, count in refused.items():
            self.queue_refused.labels(model, reason).inc(count)
            refused[reason] = 0

    def render(self) -> bytes:
        """Return the page that Prometheus scrapes."""
        if self._present is None or not self._is_shared:
            return generate_latest(self.registry)
        return generate_latest(_OnlyPresent(self.registry, self._present))


class _OnlyPresent(CollectorRegistry):
    """A registry without the series of backends that are gone."""

    def __init__(self, registry: CollectorRegistry, present: frozenset[tuple[str, str]]) -> None:
        super().__init__()
        self._registry = registry
        self._present = present

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with the remaining samples."""
        for metric in self._registry.collect():
            metric.samples = [
                sample
                for sample in metric.samples
                if not (name := sample.labels.get("backend")) or (sample.labels["model"], name) in self._present
            ]
            yield metric
