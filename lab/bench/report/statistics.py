"""Figures from records: percentiles, acceptance, and speedups with their intervals.

TTFT, TPOT, ITL and end-to-end are defined as in `vllm bench serve` (`calculate_metrics` in its `serve.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.engine_metrics import EngineMetrics
from lab.bench.record import Drafting, Record
from lab.bench.report.results import Acceptance, Distribution, Failures, Interval

Floats = npt.NDArray[np.float64]

_RESAMPLES = 2000
_LEVELS = (2.5, 97.5)


def distribution(seconds: Sequence[float] | Floats) -> Distribution | None:
    """Return the distribution of times given in seconds; None of no times."""
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
    """Return the time between one chunk and the next, over all answers."""
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
    """Tell how speculation went, by the best source that there is; None if nothing was drafted."""
    told = [record for record in completed if record.drafting is not None]
    if told:
        total = _sum([record.drafting for record in told if record.drafting is not None])
        return _accepted("answers", total, sum(record.output_tokens for record in told))
    if before is not None and after is not None:
        return _accepted("counters", _difference(before, after), after.generation_tokens - before.generation_tokens)
    per_chunk = tokens_per_chunk(completed)
    return None if per_chunk is None else Acceptance("chunks", None, per_chunk, per_chunk)


def tokens_per_chunk(completed: Sequence[Record]) -> float | None:
    """Return output tokens over chunks; None where an answer brought no usage to count the tokens by."""
    chunks = sum(len(record.chunks_s) for record in completed)
    if not chunks or not has_usage(completed):
        return None
    return sum(record.output_tokens for record in completed) / chunks


def has_usage(records: Sequence[Record]) -> bool:
    """Tell whether every answer brought its usage."""
    return all(record.usage is not None and record.usage.output_tokens is not None for record in records)


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


def _sum(each: Sequence[Drafting]) -> Drafting:
    accepted_at = np.zeros(max(len(one.accepted_at) for one in each), dtype=np.int64)
    for one in each:
        accepted_at[: len(one.accepted_at)] += one.accepted_at
    return Drafting(
        sum(one.steps for one in each),
        sum(one.drafted_tokens for one in each),
        sum(one.accepted_tokens for one in each),
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
    """The requests of one run, as far as speedups need them; each array has shape (requests,).

    Parameters
    ----------
    index
        Which prompt, ascending.
    tpot_s
        NaN for an answer of one token.
    output_tokens_per_s
        Of the whole run.
    closed
        Whether requests followed each other, so that faster answers make more of them.
    """

    index: npt.NDArray[np.int64]
    tokens: Floats
    e2e_s: Floats
    tpot_s: Floats
    output_tokens_per_s: float
    closed: bool

    @classmethod
    def of(cls, completed: Sequence[Record], output_tokens_per_s: float, *, closed: bool) -> Sample:
        """Take what is needed from the records."""
        ordered = sorted(completed, key=lambda record: record.index)
        return cls(
            np.array([record.index for record in ordered], dtype=np.int64),
            np.array([record.output_tokens for record in ordered], dtype=np.float64),
            np.array([record.e2e_s for record in ordered]),
            np.array([np.nan if record.tpot_s is None else record.tpot_s for record in ordered]),
            output_tokens_per_s,
            closed,
        )

    def throughput(self, rows: npt.NDArray[np.int64]) -> float:
        """Return the output tokens per second that the run would have had with the requests in `rows`.

        Notes
        -----
        In a closed loop, by Little's law, tokens per second are proportional to tokens over request time; in an open
        one the arrivals set the time, and they are proportional to the tokens.
        """
        if not self.closed:
            return float(self.output_tokens_per_s * self.tokens[rows].mean() / self.tokens.mean())
        share = self.tokens[rows].sum() / self.e2e_s[rows].sum()
        return float(self.output_tokens_per_s * share / (self.tokens.sum() / self.e2e_s.sum()))


def compare(run: Sample, baseline: Sample, seed: int) -> tuple[Interval, Interval | None]:
    """Return the speedups in output tokens per second and in median TPOT.

    Notes
    -----
    The intervals are bootstrap percentile intervals over requests (Efron and Tibshirani, 1993, chapter 13), 2,000
    resamples. Where both runs answered the same prompts the resampling is paired: what is easy for both is no
    difference between them.
    """
    random = np.random.default_rng(seed)
    paired = np.array_equal(run.index, baseline.index)
    throughput, tpot = np.empty(_RESAMPLES), np.empty(_RESAMPLES)
    has_tpot = not (np.isnan(run.tpot_s).all() or np.isnan(baseline.tpot_s).all())
    for turn in range(_RESAMPLES):
        rows = random.integers(0, len(run.index), len(run.index))
        others = rows if paired else random.integers(0, len(baseline.index), len(baseline.index))
        throughput[turn] = run.throughput(rows) / baseline.throughput(others)
        if has_tpot:
            tpot[turn] = _median(baseline.tpot_s[others]) / _median(run.tpot_s[rows])
    ratio = run.output_tokens_per_s / baseline.output_tokens_per_s
    of_tpot = _interval(_median(baseline.tpot_s) / _median(run.tpot_s), tpot) if has_tpot else None
    return _interval(ratio, throughput), of_tpot


def _median(values: Floats) -> float:
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else float("nan")


def _interval(ratio: float, resampled: Floats) -> Interval:
    low, high = np.nanpercentile(resampled, _LEVELS)
    return Interval(float(ratio), float(low), float(high))
