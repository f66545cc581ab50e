"""What comes of a benchmark: the figures of every run, and the document that holds them all.

These classes are the document: `--json` writes them as they stand. `docs/bench.md` tells what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lab.bench.workload import Load

SCHEMA = "speculation-gateway.bench/1"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times in milliseconds.

    Parameters
    ----------
    quantiles
        Shape (101,): the 0th to the 100th percentile, between order statistics by linear interpolation.
    """

    mean: float
    p50: float
    p95: float
    p99: float
    quantiles: tuple[float, ...] = field(repr=False, default=())


@dataclass(frozen=True, slots=True)
class Failures:
    """How many requests failed in one way, and what the first of them said."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How speculation went.

    Parameters
    ----------
    source
        `answers`: the engine's own account in each answer. `counters`: the difference of the engine's `/metrics`
        before and after the run, other clients' requests included. `chunks`: output tokens per chunk, which tells
        no rate.
    rate
        Accepted over drafted tokens.
    length
        Accepted + 1, over the steps that drafted: vLLM's acceptance length. From `chunks`, tokens per chunk.
    tokens_per_step
        Output tokens over engine steps, those that drafted nothing included.
    by_position
        Share of the drafting steps that accepted the draft at each position, shape (k,).
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
    """How the load generator fared: its share of one core, lateness of its requests, stalls of its event loop."""

    cpu_share: float
    late_p50_ms: float | None
    late_p99_ms: float | None
    stall_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio and its 95 % interval, from resampling the requests."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times better than the baseline under the same load and temperature; above 1 is better.

    Parameters
    ----------
    baseline
        Name of the target compared with.
    output_tokens_per_s
        This run's over the baseline's.
    tpot_p50
        The baseline's median TPOT over this run's.
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
        Requests; all figures are over the completed ones.
    duration_s
        From the start of the run to the end of the last answer.
    ttft, itl, tpot, e2e
        Time to first token, between chunks (one a step), per output token after the first, to the last token; None
        where no request had one.
    tokens_counted_by
        `usage`, or `chunks` where an answer brought no usage.
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
    speedup: Speedup | None = None

    @property
    def cell(self) -> tuple[str, float | None, str, float]:
        """What runs must have in common to be compared."""
        return self.model, self.temperature, self.load.kind, self.load.value


@dataclass(frozen=True, slots=True)
class Report:
    """The whole benchmark.

    Parameters
    ----------
    schema
        Name and version of this form.
    created
        When it began, ISO 8601.
    command
        The arguments that it was started with, keys left out.
    settings
        What they came to.
    interrupted
        Whether it was stopped before its end.
    not_measured
        Targets that could not be measured, and why.
    """

    schema: str
    version: str
    created: str
    command: tuple[str, ...]
    settings: dict[str, object]
    interrupted: bool
    runs: tuple[Run, ...]
    not_measured: dict[str, str]
