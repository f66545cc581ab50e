"""Results of a benchmark: the figures of every run, and the report.

`--json` writes these classes as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lab.bench.workload import Load
from lab.statistics import Interval

SCHEMA = "speculation-gateway.bench/1"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    # The 0th to the 100th percentile by linear interpolation, shape (101,).
    quantiles: tuple[float, ...] = field(repr=False, default=())


@dataclass(frozen=True, slots=True)
class Failures:
    """Number of requests with one kind of failure, and the message of the first."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of drafts in a run."""

    # `answers`: the engine's report in each answer. `counters`: the difference of the engine's `/metrics` before and
    # after the run, which includes requests of other clients. `chunks`: output tokens per chunk, without a rate.
    source: str
    rate: float | None  # accepted over drafted tokens
    # Mean accepted tokens + 1 over the steps with a draft: vLLM's acceptance length. From `chunks`, tokens per chunk.
    length: float
    tokens_per_step: float  # output tokens over engine steps, including those without a draft
    by_position: tuple[float, ...] = ()  # share of the steps with a draft that accepted it at each position, shape (k,)
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
    """The course of a run in equal intervals from its start, shape (intervals,) each."""

    interval_s: float
    in_flight: tuple[int, ...]  # requests in flight in the middle of the interval
    # sent_per_s, output_tokens_per_s: requests sent, and tokens of the answers that ended, per second.
    sent_per_s: tuple[float, ...]
    output_tokens_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speedup over the baseline under the same load and temperature; above 1 is better."""

    baseline: str  # name of the baseline target
    output_tokens_per_s: Interval  # throughput of this run over that of the baseline
    tpot_p50: Interval | None  # median TPOT of the baseline over that of this run


@dataclass(frozen=True, slots=True)
class Run:
    """One target under one load at one temperature."""

    target: str
    model: str
    method: str | None
    k: int | None
    simulated: bool
    temperature: float | None
    load: Load
    # completed, failed: numbers of requests; all figures are over the completed ones.
    completed: int
    failed: int
    failures: tuple[Failures, ...]
    interrupted: bool
    duration_s: float  # seconds from the start of the run to the end of the last answer
    input_tokens: int
    cached_tokens: int | None
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    # ttft, itl, tpot, e2e: time to the first token, between chunks (one per step), per output token after the first, to
    # the last token; None if no request has one.
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    acceptance: Acceptance | None
    tokens_per_chunk: float | None
    tokens_counted_by: str  # `usage`, or `chunks` if an answer had no usage
    generator: GeneratorFigures
    notes: tuple[str, ...]
    timeline: Timeline | None = None  # none if no request was completed
    speedup: Speedup | None = None

    @property
    def cell(self) -> tuple[str, float | None, str, float]:
        """Model, temperature and load; runs with the same cell are compared."""
        return self.model, self.temperature, self.load.kind, self.load.value


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a benchmark."""

    schema: str  # name and version of this format
    version: str
    created: str  # start time, ISO 8601
    command: tuple[str, ...]  # arguments of the command, without secrets
    settings: dict[str, object]  # settings after validation
    interrupted: bool  # whether the benchmark was stopped early
    runs: tuple[Run, ...]
    not_measured: dict[str, str]  # reason for each target that could not be measured
