"""What was measured of a backend of late: differences between what was counted at two times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from backends.engine_metrics import EngineMetrics
from gateway.dashboard.document import Acceptance, Quantiles
from gateway.dashboard.totals import Histogram, Totals

POINT_S = 5.0
"""Seconds between two readings."""

STEP_WINDOW_S = 10.0
RATE_WINDOW_S = 60.0
WINDOW_S = 300.0
"""Of the quantiles that are shown; those over time have `RATE_WINDOW_S`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a backend of late, see `BackendView`."""

    step_s: float | None = None
    requests_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    failed: int = 0
    ttft: Quantiles | None = None
    tpot: Quantiles | None = None
    ttft_of_late: Quantiles | None = None
    tpot_of_late: Quantiles | None = None
    acceptance: Acceptance | None = None


class Recent:
    """The readings of a backend in the last minutes."""

    def __init__(self, ttft_bounds: Sequence[float], tpot_bounds: Sequence[float]) -> None:
        # _ttft_bounds, _tpot_bounds: upper bounds of the histograms' buckets, in seconds.
        self._ttft_bounds = ttft_bounds
        self._tpot_bounds = tpot_bounds
        self._readings: deque[Totals] = deque(maxlen=int(WINDOW_S / POINT_S) + 1)
        self.measured = Measured()

    def add(self, now: Totals) -> None:
        """Add a reading, and set `measured`."""
        readings = self._readings
        if readings and now.ended < readings[-1].ended:  # the counts of a backend that left and came back
            readings.clear()
        readings.append(now)
        first, minute, lately = (
            next(self._within(now, window_s)) for window_s in (WINDOW_S, RATE_WINDOW_S, STEP_WINDOW_S)
        )
        elapsed_s = now.at_s - minute.at_s
        steps = sum(_since(lately.step, now.step))

        def per_s(count: float) -> float:
            return count / elapsed_s if elapsed_s else 0.0

        self.measured = Measured(
            (now.step.total - lately.step.total) / steps if steps else None,
            per_s(now.ended - minute.ended),
            per_s(now.output_tokens - minute.output_tokens),
            round(now.failed - first.failed),
            quantiles(self._ttft_bounds, _since(first.ttft, now.ttft)),
            quantiles(self._tpot_bounds, _since(first.tpot, now.tpot)),
            quantiles(self._ttft_bounds, _since(minute.ttft, now.ttft)),
            quantiles(self._tpot_bounds, _since(minute.tpot, now.tpot)),
            self._acceptance(now),
        )

    def _within(self, now: Totals, window_s: float) -> Iterator[Totals]:
        """Yield the readings of a window, the oldest first."""
        return (one for one in self._readings if now.at_s - one.at_s <= window_s + POINT_S / 2)

    def _acceptance(self, now: Totals) -> Acceptance | None:
        reported = next((one for one in self._within(now, RATE_WINDOW_S) if one.engine is not None), now)
        return acceptance(reported.engine, now.engine, now.at_s - reported.at_s)


def _since(then: Histogram, now: Histogram) -> list[float]:
    return [after - before for before, after in zip(then.counts, now.counts, strict=True)]


def quantiles(bounds: Sequence[float], counts: Sequence[float]) -> Quantiles | None:
    """Return quantiles of a histogram, interpolated within its buckets as Prometheus' `histogram_quantile` does.

    Examples
    --------
    >>> quantiles((0.1, 0.2, 0.4), (0, 100, 0, 0))
    Quantiles(p50_s=0.15000000000000002, p95_s=0.195, p99_s=0.199, count=100)
    """
    cumulated = list(accumulate(counts))
    count = round(cumulated[-1])
    if count <= 0:
        return None

    def at(share: float) -> float:
        rank = share * cumulated[-1]
        index = next(index for index, upto in enumerate(cumulated) if upto >= rank)
        if index == len(bounds):
            return bounds[-1]
        lower = bounds[index - 1] if index else 0.0
        return lower + (bounds[index] - lower) * (rank - cumulated[index] + counts[index]) / counts[index]

    return Quantiles(at(0.5), at(0.95), at(0.99), count)


def acceptance(then: EngineMetrics | None, now: EngineMetrics | None, elapsed_s: float) -> Acceptance | None:
    """Return what an engine accepted between two reports, or since it started if it drafted nothing between them.

    Examples
    --------
    >>> before = EngineMetrics(drafts=100, draft_tokens=300, accepted_tokens=150, accepted_per_position=(90, 45, 15))
    >>> after = EngineMetrics(drafts=200, draft_tokens=600, accepted_tokens=330, accepted_per_position=(180, 105, 45))
    >>> acceptance(before, after, 60.0)
    Acceptance(rate=0.6, tokens_per_step=2.8, by_position=[0.9, 0.6, 0.3], drafts=100, window_s=60.0)
    """
    if now is None or not now.drafts:
        return None
    window_s: float | None = elapsed_s
    if then is None or then.drafts >= now.drafts:  # the engine has drafted nothing since, or started again
        then, window_s = EngineMetrics(), None
    drafts, drafted = now.drafts - then.drafts, now.draft_tokens - then.draft_tokens
    accepted = now.accepted_tokens - then.accepted_tokens
    earlier = (*then.accepted_per_position, *[0] * len(now.accepted_per_position))
    return Acceptance(
        accepted / drafted if drafted else 0.0,
        1.0 + accepted / drafts,
        [(after - before) / drafts for after, before in zip(now.accepted_per_position, earlier, strict=False)],
        drafts,
        window_s,
    )
