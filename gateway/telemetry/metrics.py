"""The Prometheus metrics `gateway_...`, all with bounded label values.

With one worker the values live in the process. With several, `PROMETHEUS_MULTIPROC_DIR` is set before this module is
imported, the workers keep the values in files there, and each worker can serve the page of all. Updates on the request
path get there with `refresh` (see `series`): the page is exact for the worker that serves it, and at most half a second
old for the others.
"""

from __future__ import annotations

import logging
import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.multiprocess import MultiProcessCollector

from backends.backend import Backend, State
from backends.background import Work
from backends.contradictions import KINDS
from backends.engine_metrics import EngineMetrics
from gateway.telemetry.exposition import render
from gateway.telemetry.series import Count, Counts, Distribution, Distributions, forget_series

logger = logging.getLogger(__name__)

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
_SAY_EVERY_S = 60.0
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
    estimated_tokens: Count
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
        self._said_s: dict[tuple[str, ...], float] = {}  # when a line was logged of what is implausible

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

        self.requests = counter("gateway_requests", "Requests that ended, by outcome", (*_BACKEND, "outcome"))
        self.ttft = histogram(
            "gateway_ttft_seconds",
            "From the request's last byte to the first chunk of the answer; streams only",
            _BACKEND,
            _LATENCY_S,
        )
        self.itl = histogram(
            "gateway_itl_seconds",
            "Between two chunks of a stream: one engine step, which may emit several tokens",
            _BACKEND,
            _STEP_S,
        )
        self.tpot = histogram(
            "gateway_tpot_seconds",
            "Time per output token after the first; for answers that are not streamed, as the engine reports it",
            _BACKEND,
            _STEP_S,
        )
        self.e2e = histogram(
            "gateway_e2e_seconds", "From the request's last byte to the end of the answer", _BACKEND, _LATENCY_S
        )
        self.queue = histogram(
            "gateway_queue_seconds", "Time in the engine's queue, for engines that report it", _BACKEND, _LATENCY_S
        )
        self.overhead = histogram(
            "gateway_overhead_seconds",
            "Time in the gateway itself: from the request's last byte until it is sent to a backend, without the "
            "queue; first attempt only",
            ("model",),
            _OVERHEAD_S,
        )
        self.prompt_tokens = counter(
            "gateway_prompt_tokens", "Prompt tokens: counted by the engine, else estimated", _BACKEND
        )
        self.output_tokens = counter(
            "gateway_output_tokens",
            "Output tokens: counted by the engine, else estimated from the number of chunks",
            _BACKEND,
        )
        self.estimated_tokens = counter(
            "gateway_estimated_output_tokens",
            "The part of gateway_output_tokens_total that is an estimate, since the engine did not report them",
            _BACKEND,
        )
        self.steps = counter("gateway_steps", "Engine steps that emitted tokens", (*_BACKEND, "temperature", "source"))
        self.step_tokens = counter(
            "gateway_step_tokens", "Tokens that the counted engine steps emitted", (*_BACKEND, "temperature", "source")
        )
        self.drafted = counter(
            "gateway_drafted_tokens",
            "Tokens drafted, for engines that report it with each answer",
            (*_BACKEND, "temperature"),
        )
        self.accepted = counter(
            "gateway_accepted_tokens",
            "Drafted tokens that the target accepted, for engines that report it with each answer",
            (*_BACKEND, "temperature"),
        )
        self.implausible = counter(
            "gateway_implausible_reports",
            "Numbers and pages that the backend reported and that cannot be, which were ignored, by what they are",
            (*_BACKEND, "what"),
        )
        self.decisions = counter(
            "gateway_decisions", "Choices of a backend; a retried request counts twice", ("model", "policy", "reason")
        )
        self.policy_errors = counter(
            "gateway_policy_errors",
            "Exceptions raised by the policy, by method: `choose`, after which `least_loaded` routes the request "
            "(reason `policy_failed`); `observe`, `observe_shadow`, `maintenance`, `assess` (for the dashboard), "
            "`forget`, `engine_changed`, `take_over` or `warm_up`, which are left out",
            ("model", "call"),
        )
        self.retries = counter(
            "gateway_retries",
            "Requests that failed at this backend before any part of the answer was sent, and were sent to another one",
            (*_BACKEND, "kind"),
        )
        self.retries_refused = counter(
            "gateway_retries_refused",
            "Requests that failed and were not sent to another backend, since the model's retry budget was spent",
            ("model",),
        )
        self.rescues = counter(
            "gateway_rescues",
            "Streams that broke off at this backend in the middle, of models with `rescue`, by what came of them",
            (*_BACKEND, "outcome"),
        )
        self.queue_length = gauge(
            "gateway_queue_length", "Requests that wait in the gateway, of a model with a queue", ("model",), "livesum"
        )
        self.queue_wait = histogram(
            "gateway_queue_wait_seconds",
            "Time in the gateway's queue, of requests that waited and were then sent; part of the time to the "
            "first chunk and to the end",
            ("model",),
            _LATENCY_S,
        )
        self.queue_refused = counter(
            "gateway_queue_refused",
            "Requests that left the queue unsent: `full` (refused), `evicted` (for one of higher priority), "
            "`timeout` (`max_wait_s`), `deadline`",
            ("model", "reason"),
        )
        self.keys = counter("gateway_key_tokens", "Prompt and output tokens that a key was charged", ("key",))
        self.recorded = counter(
            "gateway_recorder_records",
            "Requests to be recorded: `written` to a file; `dropped` because the queue was full; `failed` because"
            " the file could not be written",
            ("result",),
        )
        self.recorded_bytes = counter(
            "gateway_recorder_bytes", "Bytes written to the recorder's files, after compression", ("text",)
        )
        self.recorder_queue = gauge(
            "gateway_recorder_queue", "Requests waiting to be written by the recorder", ("text",), "livesum"
        )
        self.telemetry = counter(
            "gateway_telemetry_requests",
            "Requests reported as spans, metrics or lines of the access log, by what came of that",
            ("signal", "result"),
        )
        self.telemetry_queue = gauge(
            "gateway_telemetry_queue", "Requests waiting to be reported", ("signal",), "livesum"
        )
        self.shadow = counter(
            "gateway_shadow_texts",
            "Finished texts for shadow drafting: `replayed`; `dropped` because too many were waiting; `failed`",
            ("model", "result"),
        )
        self.shadow_cpu = counter("gateway_shadow_cpu_seconds", "CPU time of shadow drafting", ("model",))
        self.in_flight = gauge(
            "gateway_in_flight", "Requests of this gateway in flight at the backend", _BACKEND, "livesum"
        )
        self.up = gauge("gateway_backend_up", "1 if the backend may receive requests", _BACKEND)
        self.state = gauge("gateway_backend_state", "1 for the current state of the backend", (*_BACKEND, "state"))
        self.simulated = gauge("gateway_backend_simulated", "1 if the backend is simulated", _BACKEND)
        self.running = gauge("gateway_backend_running", "Requests in the engine's batch, from all clients", _BACKEND)
        self.waiting = gauge("gateway_backend_waiting", "Requests queued in the engine, from all clients", _BACKEND)
        self.kv_usage = gauge("gateway_backend_kv_usage_ratio", "KV cache in use, 0 to 1", _BACKEND)
        self.acceptance = gauge(
            "gateway_backend_acceptance_ratio", "Accepted over drafted tokens since the engine started", _BACKEND
        )
        self.acceptance_length = gauge(
            "gateway_backend_acceptance_length",
            "Accepted + 1, over the steps that drafted, since the engine started",
            _BACKEND,
        )
        self.frozen = gauge(
            "gateway_policy_frozen",
            "1 if the policy was worse than `least_loaded` and `least_loaded` routes in its place",
            ("model",),
            "livemax",
        )
        self.ratio = gauge(
            "gateway_policy_ratio_to_least_loaded",
            "Time per unit of work of the policy over that of `least_loaded`, from blocks of time under each; "
            "NaN while it is too early to tell. Restarts when the policy freezes or thaws",
            ("model",),
        )
        self.outlier_ejected = gauge(
            "gateway_backend_outlier_ejected",
            "1 if the policy has ejected the backend for a time, because it does not behave as its method should",
            ("model", "backend"),
            "livemax",
        )
        self.drafter_silent = gauge(
            "gateway_backend_drafter_silent",
            "1 if the drafter of the backend gives nothing where its method should, by when it fell silent",
            (*_BACKEND, "cause"),
            "livemax",
        )
        self.contradiction = gauge(
            "gateway_backend_contradiction",
            "1 if the engine's own counters contradict the pool file: `no_speculation` or `no_drafts` though it says a "
            "method, `speculation` though it says `baseline`, another `k`, or drafts in `every_step` of a method that "
            "drafts in some",
            (*_BACKEND, "kind"),
        )
        self.shown_over_counted = gauge(
            "gateway_backend_tokens_per_step_shown_ratio",
            "Tokens per step that the answers of the backend show over those that its engine counts, where the two "
            "differ beyond noise; else 1",
            _BACKEND,
        )
        self.state_connected = gauge(
            "gateway_state_connected",
            "1 if the last attempt to use the store succeeded, 0 if it failed and the gateway continues without it",
            _STORE,
            "livemin",
        )
        self.state_last_sync = gauge(
            "gateway_state_last_sync_timestamp_seconds",
            "Time of the last successful exchange with the store, in seconds since 1970",
            _STORE,
            "livemin",
        )
        self.state_sync = histogram(
            "gateway_state_sync_seconds",
            "Duration of an exchange with the store; requests do not wait for it",
            _STORE,
            _SYNC_S,
        )
        self.state_rows = counter(
            "gateway_state_rows",
            "Rows of statistics `pushed` to the store and `read` from it; a row is the sums of one process in one"
            " table and epoch",
            (*_STORE, "direction"),
        )
        self.state_errors = counter("gateway_state_errors", "Errors of the store, by kind", (*_STORE, "kind"))
        self.discoveries = counter(
            "gateway_discoveries",
            "Answers of a source of replicas: `found`, `nothing` (no replica, so those before are kept) or `failed`",
            ("model", "source", "outcome"),
        )
        self.discovered = gauge(
            "gateway_discovered_backends", "Replicas that the source has found", ("model", "source")
        )
        self.peers = gauge(
            "gateway_peers",
            "Other processes that serve the pool and were heard of in the last 3 s; 0 if this one is alone, or "
            "Redis is out of reach",
            (),
            "livemin",
        )
        self.peers_age = histogram(
            "gateway_peers_exchange_interval_seconds",
            "Time between two exchanges through Redis; a count is at most twice as old",
            _STORE,
            _AGE_S,
        )
        self.peers_errors = counter(
            "gateway_peers_errors",
            "Failed exchanges through Redis, by kind; the process goes by its own counts and by the engines' "
            "reports then",
            (*_STORE, "kind"),
        )
        self.reloads = counter(
            "gateway_reloads", "Reloads of the pool file, by cause and outcome", ("cause", "outcome")
        )
        self.last_reload = gauge(
            "gateway_last_reload_timestamp_seconds",
            "Time of the last reload with the outcome `changed` or `unchanged`, in seconds since 1970",
            ("cause",),
            "livemax",
        )

        self.background = counter(
            "gateway_background_failures",
            "Failures of work beside the requests, by kind; it was begun again, or what failed was left out",
            ("work",),
        )
        for work in get_args(Work):  # at once: the rate of a series that begins with an event misses that
            self.background.labels(work)

    def bind(self, backend: Backend) -> BackendMetrics:
        """Return a backend's series; call once per backend, since the lookup by labels costs more than an update."""
        labels = (backend.model, backend.name, backend.said.method.value)
        return BackendMetrics(
            labels,
            ttft=self.ttft.labels(*labels),
            itl=self.itl.labels(*labels),
            tpot=self.tpot.labels(*labels),
            e2e=self.e2e.labels(*labels),
            queue=self.queue.labels(*labels),
            prompt_tokens=self.prompt_tokens.labels(*labels),
            output_tokens=self.output_tokens.labels(*labels),
            estimated_tokens=self.estimated_tokens.labels(*labels),
            # Created at once: the rate of a series that appears with its first event misses that event.
            outcomes={outcome: self.requests.labels(*labels, outcome) for outcome in OUTCOMES},
        )

    def bind_state(self, store: str, kinds: Iterable[str]) -> StateMetrics:
        """Return the series of a state store."""
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

    def note_implausible(self, backend: Backend, what: str) -> None:
        """Count what a backend reported and cannot be, and log it, once a minute at most."""
        labels = (backend.model, backend.name, backend.said.method.value, what)
        self.implausible.labels(*labels).inc()
        now_s = time.monotonic()
        if now_s - self._said_s.get(labels, -math.inf) >= _SAY_EVERY_S:
            self._said_s[labels] = now_s
            logger.warning("%s/%s reports what cannot be, which is ignored: %s", backend.model, backend.name, what)

    def count_discovery(self, model: str, source: str, outcome: str, replicas: int) -> None:
        """Count an answer of a source of replicas, and set the number of those that it has found."""
        self.discoveries.labels(model, source, outcome).inc()
        self.discovered.labels(model, source).set(replicas)

    def count_background(self, work: Work) -> None:
        """Count a failure of work beside the requests; called on the event loop."""
        self.background.labels(work).inc()

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
            labels = (backend.model, backend.name, backend.said.method.value)
            self.in_flight.labels(*labels).set(backend.in_flight)
            self.up.labels(*labels).set(backend.state in {State.UP, State.RECOVERING})
            for state in State:
                self.state.labels(*labels, state.value).set(backend.state is state)
            self.simulated.labels(*labels).set(backend.simulated)
            found = backend.difference
            self.shown_over_counted.labels(*labels).set(1.0 if found is None else found.shown / found.counted)
            for kind in KINDS:
                self.contradiction.labels(*labels, kind).set(kind in backend.contradictions)
            self.running.labels(*labels).set(backend.load.running)
            self.waiting.labels(*labels).set(backend.load.waiting)
            self.kv_usage.labels(*labels).set(backend.load.kv_usage)
            if engine is not None and engine.acceptance_rate is not None:
                self.acceptance.labels(*labels).set(engine.acceptance_rate)
            if engine is not None and engine.acceptance_length is not None:
                self.acceptance_length.labels(*labels).set(engine.acceptance_length)

    def refresh_policy(self, model: str, frozen: bool, ratio: float, ejected: Mapping[str, bool]) -> None:
        """Update the gauges of a learned policy."""
        self.frozen.labels(model).set(frozen)
        self.ratio.labels(model).set(ratio)
        for backend, is_ejected in ejected.items():
            self.outlier_ejected.labels(model, backend).set(is_ejected)

    def refresh_drafters(self, silent: Iterable[tuple[Backend, str]]) -> None:
        """Update the gauges of drafters."""
        for backend, present in silent:
            labels = (backend.model, backend.name, backend.said.method.value)
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
        """Return the page in Prometheus' text format."""
        return self.page()[0]

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page that Prometheus scrapes, and its content type."""
        present = self._present if self._is_shared else None
        return render(
            self.registry, accept, present, {"gateway_ttft_seconds": self.ttft, "gateway_e2e_seconds": self.e2e}
        )
