"""What the gateway has counted of each backend since it started, read from its metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass

from backends.engine_metrics import EngineMetrics
from gateway.routing.model import Upstream
from gateway.telemetry.metrics import BackendMetrics

_FAILED = ("engine_error", "unanswered", "interrupted")


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values so far.

    Parameters
    ----------
    counts
        Number of values in each bucket; the last one is for those beyond all bounds.
    total
        Sum of the values.
    """

    counts: list[float]
    total: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of one backend.

    Parameters
    ----------
    at_s
        Time of the reading, by `time.monotonic`.
    ended, failed
        Requests that ended, and those of them that failed at the backend.
    step
        Times between two chunks of streams.
    engine
        The metrics that its engine last reported; None if it reported none.
    """

    at_s: float
    ended: float
    failed: float
    output_tokens: float
    step: Histogram
    ttft: Histogram
    tpot: Histogram
    engine: EngineMetrics | None


def totals_of(upstream: Upstream, engine: EngineMetrics | None) -> Totals:
    """Return what this process has counted of a backend."""
    counted: BackendMetrics = upstream.metrics
    outcomes = {outcome: count.total() for outcome, count in counted.outcomes.items()}
    return Totals(
        time.monotonic(),
        sum(outcomes.values()),
        sum(outcomes[outcome] for outcome in _FAILED),
        counted.output_tokens.total(),
        Histogram(*counted.itl.total()),
        Histogram(*counted.ttft.total()),
        Histogram(*counted.tpot.total()),
        engine,
    )
