"""Figures from records: percentiles, acceptance, and speedups with intervals.

TTFT, TPOT, ITL and end-to-end time are defined as in `vllm bench serve` (`calculate_metrics` in its `serve.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.engine_metrics import EngineMetrics
from lab.bench.record import Drafting, Record
from lab.bench.report.results import Acceptance, Distribution, Failures, Timeline
from lab.statistics import Floats, Interval, of_parts

_PARTS = 8  # of a run
_INTERVALS = 30  # of a timeline


def distribution(seconds: Sequence[float] | Floats) -> Distribution | None:
    """Return the distribution of times given in seconds; None if there are none.

    Examples
    --------
    >>> times = distribution([0.010, 0.020, 0.030])
    >>> times.mean, times.p50
    (20.0, 20.0)
    """
    if len(seconds) == 0:
        return None
    milliseconds = np.asarray(seconds, dtype=np.float64) * 1000.0
    quantiles = np.percentile(milliseconds, np.arange(101))
    return Distribution(
        float(milliseconds.mean()),
        float(quantiles[50]),
        float(quantiles[95]),
        float(quantiles[99]),
        tuple(round(float(value), 4) for value in quantiles),
    )


def inter_token_s(records: Sequence[Record]) -> Floats:
    """Return the times between consecutive chunks, over all answers."""
    return np.concatenate([np.diff(np.frombuffer(record.chunks_s)) for record in records] or [np.empty(0)])


def failures(records: Sequence[Record]) -> tuple[Failures, ...]:
    """Count the failed requests by kind, the most frequent first."""
    counts = Counter(record.error for record in records if record.error is not None)
    examples: dict[str, str] = {}
    for record in records:
        if record.error is not None:
            examples.setdefault(record.error, record.detail)
    return tuple(Failures(kind, count, examples[kind]) for kind, count in counts.most_common())


def acceptance(
    completed: Sequence[Record], before: EngineMetrics | None, after: EngineMetrics | None
) -> Acceptance | None:
    """Return the acceptance of drafts from the best available source; None if nothing was drafted."""
    reported = [record for record in completed if record.drafting is not None]
    if reported:
        total = _sum([record.drafting for record in reported if record.drafting is not None])
        return _accepted("answers", total, sum(record.output_tokens for record in reported))
    if before is not None and after is not None:
        return _accepted("counters", _difference(before, after), after.generation_tokens - before.generation_tokens)
    per_chunk = tokens_per_chunk(completed)
    return None if per_chunk is None else Acceptance("chunks", None, per_chunk, per_chunk)


def tokens_per_chunk(completed: Sequence[Record]) -> float | None:
    """Return output tokens per chunk; None if an answer had no usage."""
    chunks = sum(len(record.chunks_s) for record in completed)
    if not chunks or not has_usage(completed):
        return None
    return sum(record.output_tokens for record in completed) / chunks


def has_usage(records: Sequence[Record]) -> bool:
    """Return whether every answer had its usage."""
    return all(record.usage is not None and record.usage.output_tokens is not None for record in records)


def timeline(completed: Sequence[Record], start_s: float, end_s: float) -> Timeline | None:
    """Return the course of the completed requests between two times of `Record`; None without any."""
    if not completed:
        return None
    edges = np.linspace(start_s, max(end_s, start_s + 1e-3), _INTERVALS + 1)
    interval_s = float(edges[1] - edges[0])
    sent, ended = (np.array([getattr(record, name) for record in completed]) for name in ("sent_s", "ended_s"))
    middle = (edges[1:] + edges[:-1]) / 2
    in_flight = np.searchsorted(np.sort(sent), middle) - np.searchsorted(np.sort(ended), middle)
    tokens = np.histogram(ended, edges, weights=[record.output_tokens for record in completed])[0]
    return Timeline(
        interval_s,
        tuple(in_flight.tolist()),
        tuple((np.histogram(sent, edges)[0] / interval_s).round(4).tolist()),
        tuple((tokens / interval_s).round(4).tolist()),
    )


def _accepted(source: str, drafting: Drafting, output_tokens: int) -> Acceptance | None:
    if drafting.steps <= 0 or drafting.drafted_tokens <= 0:
        return None
    steps = output_tokens - drafting.accepted_tokens
    return Acceptance(
        source,
        drafting.accepted_tokens / drafting.drafted_tokens,
        1.0 + drafting.accepted_tokens / drafting.steps,
        output_tokens / steps if steps > 0 else 1.0,
        tuple(count / drafting.steps for count in drafting.accepted_at),
        drafting.drafted_tokens,
        drafting.accepted_tokens,
        drafting.steps,
    )


def _sum(counts: Sequence[Drafting]) -> Drafting:
    accepted_at = np.zeros(max(len(count.accepted_at) for count in counts), dtype=np.int64)
    for count in counts:
        accepted_at[: len(count.accepted_at)] += count.accepted_at
    return Drafting(
        sum(count.steps for count in counts),
        sum(count.drafted_tokens for count in counts),
        sum(count.accepted_tokens for count in counts),
        tuple(int(count) for count in accepted_at),
    )


def _difference(before: EngineMetrics, after: EngineMetrics) -> Drafting:
    earlier = (*before.accepted_per_position, *[0] * len(after.accepted_per_position))
    return Drafting(
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
        tuple(now - then for now, then in zip(after.accepted_per_position, earlier, strict=False)),
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """The requests of one run, as needed for speedups; each array has shape (requests,)."""

    index: npt.NDArray[np.int64]  # index of the prompt, ascending
    tokens: Floats  # output tokens
    e2e_s: Floats
    tpot_s: Floats  # seconds per output token after the first; NaN for an answer of one token
    parts: int  # parts one after another, 1 to 8, each at least as long as the longest request
    output_tokens_per_s: float  # throughput of the whole run
    closed: bool  # whether the loop was closed, so that faster answers lead to more requests

    @classmethod
    def of(cls, completed: Sequence[Record], output_tokens_per_s: float, *, closed: bool) -> Sample:
        """Return the sample of completed records."""
        ordered = sorted(completed, key=lambda record: record.index)
        span_s = max(record.ended_s for record in ordered) - min(record.sent_s for record in ordered)
        longest_s = max(record.ended_s - record.sent_s for record in ordered)
        return cls(
            np.array([record.index for record in ordered], dtype=np.int64),
            np.array([record.output_tokens for record in ordered], dtype=np.float64),
            np.array([record.e2e_s for record in ordered]),
            np.array([np.nan if record.tpot_s is None else record.tpot_s for record in ordered]),
            max(1, min(_PARTS, int(span_s / longest_s))),
            output_tokens_per_s,
            closed,
        )

    def throughput(self, rows: npt.NDArray[np.int64]) -> float:
        """Return the output tokens per second that the run would have had with the requests in `rows`.

        Notes
        -----
        In a closed loop, tokens per second are proportional to tokens over total request time, by Little's law. In an
        open loop the arrivals determine the duration, so they are proportional to the tokens.
        """
        if not self.closed:
            return float(self.output_tokens_per_s * self.tokens[rows].mean() / self.tokens.mean())
        share = self.tokens[rows].sum() / self.e2e_s[rows].sum()
        return float(self.output_tokens_per_s * share / (self.tokens.sum() / self.e2e_s.sum()))


def compare(run: Sample, baseline: Sample) -> tuple[Interval, Interval | None]:
    """Return the speedups in output tokens per second and in median TPOT.

    Notes
    -----
    Requests share batches, so the units are up to eight parts of the runs one after another, each at least as long as
    the longest request, over which the intervals are a jackknife. Runs that are too short for two parts have none.
    """
    has_tpot = not (np.isnan(run.tpot_s).all() or np.isnan(baseline.tpot_s).all())
    of_tpot, throughputs, tpots = None, [], []
    parts = min(run.parts, baseline.parts)
    for part in range(parts if parts > 1 else 0):
        rows, baseline_rows = (
            np.flatnonzero(np.arange(len(one.index)) * parts // len(one.index) != part) for one in (run, baseline)
        )
        throughputs.append(run.throughput(rows) / baseline.throughput(baseline_rows))
        if has_tpot:
            tpots.append(_median(baseline.tpot_s[baseline_rows]) / _median(run.tpot_s[rows]))
    if has_tpot:
        of_tpot = of_parts(_median(baseline.tpot_s) / _median(run.tpot_s), tpots)
    return of_parts(run.output_tokens_per_s / baseline.output_tokens_per_s, throughputs), of_tpot


def _median(values: Floats) -> float:
    return float(np.nanmedian(values))
