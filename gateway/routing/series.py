"""The series of requests: by backend, by model and by key."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass

from backends.backend import Backend
from backends.background import Seldom
from gateway.telemetry.registry import Registry
from gateway.telemetry.series import Count, Distribution

log = logging.getLogger(__name__)

OUTCOMES = ("ok", "client_error", "engine_error", "unanswered", "interrupted", "cancelled")
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
    """The series of one backend that nearly every request updates: a lookup by labels costs more than the update."""

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
        self.requests = counter("gateway_requests")
        self.ttft = histogram("gateway_ttft_seconds")
        self.itl = histogram("gateway_itl_seconds")
        self.tpot = histogram("gateway_tpot_seconds")
        self.e2e = histogram("gateway_e2e_seconds")
        self.overhead = histogram("gateway_overhead_seconds")
        self.prompt_tokens = counter("gateway_prompt_tokens")
        self.output_tokens = counter("gateway_output_tokens")
        self.context = histogram("gateway_context_tokens")
        self.beyond_limit = counter("gateway_requests_beyond_drafter_limit")
        self.steps = counter("gateway_steps")
        self.step_tokens = counter("gateway_step_tokens")
        self.drafted = counter("gateway_drafted_tokens")
        self.accepted = counter("gateway_accepted_tokens")
        self.implausible = counter("gateway_implausible_reports")
        self.decisions = counter("gateway_decisions")
        self.retries = counter("gateway_retries")
        self.retries_refused = counter("gateway_retries_refused")
        self.rescues = counter("gateway_rescues")
        self.queue_length = registry.gauge("gateway_queue_length")
        self.queue_wait = histogram("gateway_queue_wait_seconds")
        self.queue_refused = counter("gateway_queue_refused")
        self.keys = counter("gateway_key_tokens")
        self._said = Seldom()  # rate-limits the log of implausible reports

    def of(self, backend: Backend) -> BackendSeries:
        """Return the series of a backend."""
        labels = (backend.model, backend.name, backend.declared.method.value)
        return BackendSeries(
            labels,
            ttft=self.ttft.labels(*labels),
            itl=self.itl.labels(*labels),
            tpot=self.tpot.labels(*labels),
            e2e=self.e2e.labels(*labels),
            prompt_tokens=self.prompt_tokens.labels(*labels),
            output_tokens=self.output_tokens.labels(*labels),
            context=self.context.labels(*labels),
            # Created now: the rate of a series that starts with an event misses that event.
            outcomes={outcome: self.requests.labels(*labels, outcome) for outcome in OUTCOMES},
        )

    def count_refusal(self) -> None:
        """Count a request refused before routing: invalid, without a valid key, or over a limit."""
        self.requests.labels("", "", "", "refused").inc()

    def note_implausible(self, backend: Backend, what: str) -> None:
        """Count an implausible report of a backend, and log it at most once a minute."""
        labels = (backend.model, backend.name, backend.declared.method.value, what)
        self.implausible.labels(*labels).inc()
        if self._said.may_say(labels):
            log.warning("%s/%s reports what cannot be, which is ignored: %s", backend.model, backend.name, what)

    def count_context(self, backend: Backend, series: BackendSeries, tokens: int) -> None:
        """Count the length of a request including its answer."""
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
        """Update the series of a queue, and move its counts of refusals there."""
        self.queue_length.labels(model).set(waiting)
        for reason, count in refused.items():
            self.queue_refused.labels(model, reason).inc(count)
            refused[reason] = 0
