"""Results of a benchmark: the figures of every run, and the report.

`--json` writes these classes as they are; `docs/bench.md` describes each field.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lab.bench.workload import Load
from lab.statistics import Interval

SCHEMA = "speculation-gateway.bench/1"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times in milliseconds.

    Parameters
    ----------
    quantiles
        The 0th to the 100th percentile by linear interpolation, shape (101,).
    """

    mean: float
    p50: float
    p95: float
    p99: float
    quantiles: tuple[float, ...] = field(repr=False, default=())


@dataclass(frozen=True, slots=True)
class Failures:
    """Number of requests with one kind of failure, and the message of the first."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of drafts in a run.

    Parameters
    ----------
    source
        `answers`: the engine's report in each answer. `counters`: the difference of the engine's `/metrics` before and
        after the run, which includes requests of other clients. `chunks`: output tokens per chunk, without a rate.
    rate
        Accepted over drafted tokens.
    length
        Mean accepted tokens + 1 over the steps with a draft: vLLM's acceptance length. From `chunks`, tokens per chunk.
    tokens_per_step
        Output tokens over engine steps, including those without a draft.
    by_position
        Share of the steps with a draft that accepted it at each position, shape (k,).
    """

    source: str
    rate: float | None
    length: float
    tokens_per_step: float
    by_position: tuple[float, ...] = ()
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class GeneratorFigures:
    """Health of the load generator: its share of one core, lateness of its requests, stalls of its event loop."""

    cpu_share: float
    late_p50_ms: float | None
    late_p99_ms: float | None
    stall_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The course of a run in equal intervals from its start, shape (intervals,) each.

    Parameters
    ----------
    in_flight
        Requests in flight in the middle of the interval.
    sent_per_s, output_tokens_per_s
        Requests sent, and tokens of the answers that ended, per second.
    """

    interval_s: float
    in_flight: tuple[int, ...]
    sent_per_s: tuple[float, ...]
    output_tokens_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speedup over the baseline under the same load and temperature; above 1 is better.

    Parameters
    ----------
    baseline
        Name of the baseline target.
    output_tokens_per_s
        Throughput of this run over that of the baseline.
    tpot_p50
        Median TPOT of the baseline over that of this run.
    """

    baseline: str
    output_tokens_per_s: Interval
    tpot_p50: Interval | None


@dataclass(frozen=True, slots=True)
class Run:
    """One target under one load at one temperature.

    Parameters
    ----------
    completed, failed
        Numbers of requests; all figures are over the completed ones.
    duration_s
        Seconds from the start of the run to the end of the last answer.
    ttft, itl, tpot, e2e
        Time to the first token, between chunks (one per step), per output token after the first, to the last token;
        None if no request has one.
    tokens_counted_by
        `usage`, or `chunks` if an answer had no usage.
    timeline
        None if no request was completed.
    """

    target: str
    model: str
    method: str | None
    k: int | None
    simulated: bool
    temperature: float | None
    load: Load
    completed: int
    failed: int
    failures: tuple[Failures, ...]
    interrupted: bool
    duration_s: float
    input_tokens: int
    cached_tokens: int | None
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    acceptance: Acceptance | None
    tokens_per_chunk: float | None
    tokens_counted_by: str
    generator: GeneratorFigures
    notes: tuple[str, ...]
    timeline: Timeline | None = None
    speedup: Speedup | None = None

    @property
    def cell(self) -> tuple[str, float | None, str, float]:
        """Model, temperature and load; runs with the same cell are compared."""
        return self.model, self.temperature, self.load.kind, self.load.value


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a benchmark.

    Parameters
    ----------
    schema
        Name and version of this format.
    created
        Start time, ISO 8601.
    command
        Arguments of the command, without secrets.
    settings
        Settings after validation.
    interrupted
        Whether the benchmark was stopped early.
    not_measured
        Reason for each target that could not be measured.
    """

    schema: str
    version: str
    created: str
    command: tuple[str, ...]
    settings: dict[str, object]
    interrupted: bool
    runs: tuple[Run, ...]
    not_measured: dict[str, str]
