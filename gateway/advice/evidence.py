"""What the rules of advice look at: measurements of a model's backends, and of the requests that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.draft_schedule import Speculation
from backends.occupancy import Minute
from backends.speculation import Method
from policies.learned.models.prior import StepCost
from policies.learned.models.step_time import Load


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a backend as its answers saw them.

    Parameters
    ----------
    answers
        Number of answers that they were measured on, discounted by age.
    seconds
        Mean seconds of a step.
    load
        Mean load under which they ran.
    cost
        Cost fitted to them.
    """

    answers: float
    seconds: float
    load: Load
    cost: StepCost


@dataclass(frozen=True, slots=True)
class Positions:
    """Acceptance by draft position.

    Parameters
    ----------
    drafts
        Steps that drafted.
    accepted
        How many of them accepted at least 1, 2, ..., k tokens.
    is_estimated
        Whether only the totals are known, and each position is taken to accept as many of those that reach it.
    """

    drafts: int
    accepted: tuple[float, ...]
    is_estimated: bool = False


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """The vocabularies of target and draft.

    Parameters
    ----------
    target_tokens, draft_tokens
        Sizes.
    shared
        Tokens that have the same id in both.
    """

    target_tokens: int
    draft_tokens: int
    shared: int


@dataclass(frozen=True, slots=True)
class Contradiction:
    """What an engine shows that is not as the pool file says.

    Parameters
    ----------
    text
        What the pool file says and the engine does.
    observed
        How the engine speculates, as far as that can be told.
    counters
        What shows it.
    """

    text: str
    observed: Speculation
    counters: str


@dataclass(frozen=True, slots=True)
class BackendEvidence:
    """One backend.

    Parameters
    ----------
    k
        Tokens drafted per step at most; 0 for a baseline.
    answers
        Answers whose acceptance was observed, over all backends of the arm, discounted by age.
    noise
        Standard deviation of log(tokens per step) between similar requests.
    cost_by_k
        The calibration's step cost for each k that could be set; empty where k cannot be advised.
    baseline_cost
        The calibration's step cost of a baseline.
    calibration
        Name of the calibration; empty where nothing is learned.
    contradiction
        In which way the engine contradicts the pool file; None if it does not.
    has_metrics
        Whether the engine has a page of metrics.
    prefix_caching
        Whether the engine has it; None if it does not say.
    prefix_queries, prefix_hits
        Prompt tokens looked up and found in the prefix cache.
    reported_share
        Share of the output tokens whose steps the engine reported; None if unknown.
    output_tokens
        Output tokens that this share is of.
    flags
        Flags of an engine that the gateway starts; None for another one.
    speculative_config
        As in the pool file.
    """

    name: str
    method: Method
    k: int = 0
    answers: float = 0.0
    noise: float = 0.25
    steps: Steps | None = None
    positions: Positions | None = None
    cost_by_k: Mapping[int, StepCost] = field(default_factory=dict)
    baseline_cost: StepCost | None = None
    calibration: str = ""
    is_silent: bool = False
    contradiction: Contradiction | None = None
    has_metrics: bool = True
    prefix_caching: bool | None = None
    prefix_queries: int = 0
    prefix_hits: int = 0
    reported_share: float | None = None
    output_tokens: int = 0
    minutes: tuple[Minute, ...] = ()
    flags: tuple[str, ...] | None = None
    speculative_config: Mapping[str, object] = field(default_factory=dict)
    vocabularies: Vocabularies | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """Similar requests.

    Parameters
    ----------
    tokens
        Output tokens of these requests, as a weight.
    tokens_per_step
        Expected tokens per step on each backend.
    """

    tokens: float
    tokens_per_step: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelEvidence:
    """A model's backends, and the kinds of its requests."""

    name: str
    backends: tuple[BackendEvidence, ...]
    kinds: tuple[Kind, ...] = ()
