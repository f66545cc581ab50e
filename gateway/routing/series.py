"""The series of requests: by backend, by model and by key."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass

from backends.backend import Backend
from backends.seldom import Seldom
from gateway.telemetry.registry import Registry
from gateway.telemetry.series import Count, Distribution

log = logging.getLogger(__name__)

BACKEND = ("model", "backend", "method")
OUTCOMES = ("ok", "client_error", "engine_error", "unanswered", "interrupted", "cancelled")
_LATENCY_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEP_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.045, 0.07, 0.1, 0.2, 0.5, 1.0, 3.0)
_OVERHEAD_S = (2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.2, 1.0)
_CONTEXTS = tuple(float(2**power) for power in range(8, 21))
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
class BackendSeries:
    """The series of one backend that nearly every request updates, since the lookup by labels costs more than that."""

    labels: tuple[str, str, str]
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    prompt_tokens: Count
    output_tokens: Count
    context: Distribution
    outcomes: dict[str, Count]


class RequestSeries:
    """The series of all requests."""

    def __init__(self, registry: Registry) -> None:
        counter, histogram = registry.counter, registry.histogram
        self.requests = counter("gateway_requests", "Requests that ended, by outcome", (*BACKEND, "outcome"))
        self.ttft = histogram(
            "gateway_ttft_seconds",
            "From the request's last byte to the first chunk of the answer; streams only",
            BACKEND,
            _LATENCY_S,
        )
        self.itl = histogram(
            "gateway_itl_seconds",
            "Between two chunks of a stream: one engine step, which may emit several tokens",
            BACKEND,
            _STEP_S,
        )
        self.tpot = histogram(
            "gateway_tpot_seconds",
            "Time per output token after the first; for answers that are not streamed, as the engine reports it",
            BACKEND,
            _STEP_S,
        )
        self.e2e = histogram(
            "gateway_e2e_seconds", "From the request's last byte to the end of the answer", BACKEND, _LATENCY_S
        )
        self.overhead = histogram(
            "gateway_overhead_seconds",
            "Time in the gateway itself: from the request's last byte until it is sent to a backend, without the "
            "queue; first attempt only",
            ("model",),
            _OVERHEAD_S,
        )
        self.prompt_tokens = counter(
            "gateway_prompt_tokens", "Prompt tokens: counted by the engine, else estimated", BACKEND
        )
        self.output_tokens = counter(
            "gateway_output_tokens", "Output tokens: counted by the engine, else estimated from the chunks", BACKEND
        )
        self.context = histogram(
            "gateway_context_tokens",
            "Tokens of prompt and answer together, of requests with one answer",
            BACKEND,
            _CONTEXTS,
        )
        self.beyond_limit = counter(
            "gateway_requests_beyond_drafter_limit",
            "Answered requests that were longer than what the drafter of the backend serves, by what happens then",
            (*BACKEND, "beyond"),
        )
        self.steps = counter("gateway_steps", "Engine steps that emitted tokens", (*BACKEND, "temperature", "source"))
        self.step_tokens = counter(
            "gateway_step_tokens", "Tokens that the counted engine steps emitted", (*BACKEND, "temperature", "source")
        )
        self.drafted = counter(
            "gateway_drafted_tokens",
            "Tokens drafted, for engines that report it with each answer",
            (*BACKEND, "temperature"),
        )
        self.accepted = counter(
            "gateway_accepted_tokens",
            "Drafted tokens that the target accepted, for engines that report it with each answer",
            (*BACKEND, "temperature"),
        )
        self.implausible = counter(
            "gateway_implausible_reports",
            "Numbers and pages that the backend reported and that cannot be, which were ignored, by what they are",
            (*BACKEND, "what"),
        )
        self.decisions = counter(
            "gateway_decisions", "Choices of a backend; a retried request counts twice", ("model", "policy", "reason")
        )
        self.retries = counter(
            "gateway_retries",
            "Requests that failed at this backend before any part of the answer was sent, and were sent to another one",
            (*BACKEND, "kind"),
        )
        self.retries_refused = counter(
            "gateway_retries_refused",
            "Requests that failed and were not sent to another backend, since the model's retry budget was spent",
            ("model",),
        )
        self.rescues = counter(
            "gateway_rescues",
            "Streams that broke off at this backend in the middle, of models with `rescue`, by what came of them",
            (*BACKEND, "outcome"),
        )
        self.queue_length = registry.gauge(
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
        self._said = Seldom()  # of what is implausible

    def of(self, backend: Backend) -> BackendSeries:
        """Return the series of a backend."""
        labels = (backend.model, backend.name, backend.said.method.value)
        return BackendSeries(
            labels,
            ttft=self.ttft.labels(*labels),
            itl=self.itl.labels(*labels),
            tpot=self.tpot.labels(*labels),
            e2e=self.e2e.labels(*labels),
            prompt_tokens=self.prompt_tokens.labels(*labels),
            output_tokens=self.output_tokens.labels(*labels),
            context=self.context.labels(*labels),
            # Created at once: the rate of a series that appears with its first event misses that event.
            outcomes={outcome: self.requests.labels(*labels, outcome) for outcome in OUTCOMES},
        )

    def count_refusal(self) -> None:
        """Count a request refused before routing: invalid, without a valid key, or over a limit."""
        self.requests.labels("", "", "", "refused").inc()

    def note_implausible(self, backend: Backend, what: str) -> None:
        """Count what a backend reported and cannot be, and log it, once a minute at most."""
        labels = (backend.model, backend.name, backend.said.method.value, what)
        self.implausible.labels(*labels).inc()
        if self._said.may_say(labels):
            log.warning("%s/%s reports what cannot be, which is ignored: %s", backend.model, backend.name, what)

    def count_context(self, backend: Backend, series: BackendSeries, tokens: int) -> None:
        """Count the length of a request with its answer."""
        series.context.observe(tokens)
        limit = backend.drafter_limit
        if limit is not None and tokens > limit.tokens:
            self.beyond_limit.labels(*series.labels, limit.beyond.value).inc()

    def count_steps(self, backend: BackendSeries, temperature: float, source: str, steps: float, tokens: float) -> None:
        """Count the engine steps of a request and the tokens they emitted; `source` is `engine` or `chunks`."""
        bucket = temperature_bucket(temperature)
        self.steps.labels(*backend.labels, bucket, source).inc(steps)
        self.step_tokens.labels(*backend.labels, bucket, source).inc(tokens)

    def count_drafts(self, backend: BackendSeries, temperature: float, drafted: int, accepted: int) -> None:
        """Count the drafted and accepted tokens of a request, as its engine reported them."""
        bucket = temperature_bucket(temperature)
        self.drafted.labels(*backend.labels, bucket).inc(drafted)
        self.accepted.labels(*backend.labels, bucket).inc(accepted)

    def refresh_queue(self, model: str, waiting: int, refused: dict[str, int]) -> None:
        """Update the series of a queue, and take over what it has refused, by reason."""
        self.queue_length.labels(model).set(waiting)
        for reason, count in refused.items():
            self.queue_refused.labels(model, reason).inc(count)
            refused[reason] = 0
