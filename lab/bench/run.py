"""One run of a benchmark, its figures, and its speed relative to the baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from backends.engine_metrics import CountedAcceptance
from lab.bench.targets import Target
from lab.live.session import LiveOutcome
from lab.replay.comparison import of_parts
from lab.simulation.simulate import Replayed
from lab.statistics import Interval, summary


class Condition(NamedTuple):
    """What runs under the same condition have in common, so that they are compared."""

    temperature: float | None  # None for that of the requests
    rate: float | None  # requests per second; None for that of the trace
    concurrency: int | None = None  # requests under way in a closed loop, which has no rate


EACH = ("sent_s", "prompt_tokens", "output_tokens", "steps", "ttft_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class Speedup:
    """Mean times of the baseline over those of a run, on the requests that both served; above 1 is better."""

    baseline: str
    e2e: Interval | None
    tpot: Interval | None


@dataclass(frozen=True)
class Run:
    """One target under one condition."""

    target: Target
    condition: Condition
    outcome: LiveOutcome
    acceptance: CountedAcceptance | None
    kv_tokens: int = 0  # tokens that the engine's KV cache holds; 0 if it does not say
    speedup: Speedup | None = None

    @cached_property
    def result(self) -> Replayed:
        """The times of its requests."""
        return self.outcome.replayed()[0]

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The figures as of a replay, and `itl_s`: the times between chunks, of which each is a step of the engine."""
        gaps = [np.diff(np.frombuffer(record.chunks_s)) for record in self.outcome.done]
        return self.outcome.figures({}) | {"itl_s": summary(np.concatenate(gaps or [np.empty(0)]))}

    @property
    def each(self) -> dict[str, list[float]]:
        """What is measured of each request; `steps` are the chunks, of which each is a step of the engine."""
        first_s = min((record.sent_s for record in self.outcome.records), default=0.0)
        rows = [
            (
                round(record.sent_s - first_s, 6),
                (record.usage and record.usage.prompt_tokens) or self.outcome.trace[record.index].prompt_tokens,
                record.output_tokens,
                len(record.chunks_s),
                round(record.ttft_s, 6),
                round(record.e2e_s, 6),
            )
            for record in self.outcome.done
        ]
        return {name: [row[column] for row in rows] for column, name in enumerate(EACH)}

    def compared(self, baseline: Run | None) -> Run:
        """Return the run with its speedup over one of the baseline; itself without one, or if it is that."""
        if baseline is None or baseline is self:
            return self
        e2e, tpot = (of_parts(baseline.result, self.result, metric) for metric in ("e2e_s", "tpot_s"))
        return replace(self, speedup=Speedup(baseline.target.name, e2e, tpot))
