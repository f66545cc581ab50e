"""The evidence for advice: measurements of a model's backends, and of the requests that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.draft_schedule import Speculation
from backends.drafter_limit import DrafterLimit
from backends.engine import ProbeMinute
from backends.speculation import Method
from policies.learned.prior import StepCost
from policies.learned.replica import Load, terms
from policies.trouble.troubles import TroubleFinding


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a backend, as measured on its answers."""

    answers: float  # number of answers measured, discounted by age
    seconds: float  # mean seconds of a step
    load: Load  # mean load under which they ran
    cost: StepCost  # cost fitted to them

    @property
    def fitted_s(self) -> float:
        """Seconds of a step under the mean load, by the fit."""
        return sum(terms(self.cost, self.load))


@dataclass(frozen=True, slots=True)
class Positions:
    """Acceptance by draft position."""

    drafts: int  # steps that drafted
    accepted: tuple[float, ...]  # how many of them accepted at least 1, 2, ..., k tokens


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A way in which an engine contradicts the pool file."""

    text: str  # what the pool file says and the engine does
    observed: Speculation  # how the engine speculates, as far as observed
    counters: str  # the counters that show it


@dataclass(frozen=True, slots=True)
class BackendEvidence:
    """One backend."""

    name: str
    method: Method
    k: int = 0  # tokens drafted per step at most; 0 for a baseline
    answers: float = 0.0  # answers with known acceptance, over all backends of the arm, discounted by age
    steps: Steps | None = None
    positions: Positions | None = None
    # cost_by_k, baseline_cost: the step cost by a calibration, for each k that could be set.
    cost_by_k: Mapping[int, StepCost] = field(default_factory=dict)
    calibration: str = ""  # name of that calibration
    baseline_cost: StepCost | None = None  # of a baseline; None unless the calibration is known to be its own
    is_silent: bool = False
    contradiction: Contradiction | None = None  # how the engine contradicts the pool file; None if it does not
    minutes: tuple[ProbeMinute, ...] = ()
    limit: DrafterLimit | None = None  # the longest context that its drafter serves
    # Number of its requests with at most that many tokens, including the answer, by histogram bound.
    contexts: Mapping[float, float] = field(default_factory=dict)
    flags: tuple[str, ...] | None = None  # flags of an engine that the gateway starts; else None


@dataclass(frozen=True, slots=True)
class Kind:
    """Similar requests."""

    tokens: float  # total output tokens of these requests
    tokens_per_step: Mapping[str, float]  # expected tokens per step on each backend
    sent: Mapping[str, float] = field(default_factory=dict)  # share of the tokens that each backend generated


@dataclass(frozen=True, slots=True)
class ModelEvidence:
    """A model's backends, and the kinds of its requests."""

    name: str
    backends: tuple[BackendEvidence, ...]
    kinds: tuple[Kind, ...] = ()
    troubles: tuple[TroubleFinding, ...] = ()
    compared: frozenset[frozenset[str]] = frozenset()  # pairs of methods that live traffic has compared
