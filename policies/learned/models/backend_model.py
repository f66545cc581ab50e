"""The model of each backend: its fitted costs, and its present work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from backends.backend import EngineLoad
from policies.learned.models.acceptance import AcceptanceModel
from policies.learned.models.backlog import Backlog
from policies.learned.models.buckets import Key
from policies.learned.models.length import LengthModel
from policies.learned.models.prefix_memory import BackendPrefixes
from policies.learned.models.prior import StepCost
from policies.learned.models.prompt_time import PromptTime
from policies.learned.shadow_drafting import SHADOWED


@dataclass(slots=True)
class FittedModels:
    """The result of a fit; the next fit replaces it as a whole.

    Parameters
    ----------
    steps
        Step costs by backend; a backend that is missing has the calibration's.
    observed
        Number of requests that each entry of `steps` was fitted to.
    templates
        Templates that the statistics tell apart.
    """

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    length: LengthModel = field(default_factory=LengthModel)
    steps: Mapping[str, StepCost] = field(default_factory=dict)
    observed: Mapping[str, float] = field(default_factory=dict)
    templates: frozenset[str] = frozenset()


class BackendModel:
    """The model of one backend.

    The costs and load figures that every prediction reads are kept as separate attributes: mypyc compiles them to
    native fields, while an attribute of an interpreted object costs as much as five multiplications.

    Attributes
    ----------
    prior
        Step cost from the calibration.
    cost
        Fitted step cost, or the prior.
    observed
        Number of requests that `cost` was fitted to.
    spread
        Standard deviation of log(tokens per step) around its prediction, on the backend's arm.
    has_shadow
        Whether shadow drafting tells what its method gives on a text.
    silent
        Whether its drafter is silent; it then counts as giving one token per step, and as little known.
    slowness
        Observed over fitted step time of late, at least 1.
    load
        Engine report at the last prediction; `waiting`, `others` and `reported_s` are copied from it.
    """

    def __init__(self, name: str, arm: str, prior: StepCost, fitted: FittedModels, prefixes: BackendPrefixes) -> None:
        self.name = name
        self.arm = arm
        self.prior = prior
        self.backlog = Backlog()
        self.prefixes = prefixes
        self.prompt_time = PromptTime()
        self.has_shadow = arm.partition(":")[0] in SHADOWED
        self.silent = False
        self.slowness = 1.0
        self.learn(fitted)
        self.read(_NO_REPORT)

    def learn(self, fitted: FittedModels) -> None:
        """Replace the fitted models."""
        self.fitted = fitted
        self.cost = fitted.steps.get(self.name, self.prior)
        self.observed = fitted.observed.get(self.name, 0.0)
        self.spread = fitted.acceptance.spread(self.arm)
        self.base_s, self.per_request_s, self.per_context_token_s, self.per_prompt_token_s = self.cost

    def read(self, load: EngineLoad) -> None:
        """Replace the engine report."""
        self.load = load
        self.waiting, self.others, self.reported_s = load.waiting, load.others, load.at_s
        self.prefixes.resize(load.kv_tokens)

    def acceptance(self, key: Key) -> tuple[float, float]:
        """Return the expected tokens per step for a request key, and the number of similar requests observed."""
        if self.silent:
            return 1.0, 0.0
        model = self.fitted.acceptance
        return model.tokens_per_step(self.arm, self.name, key), model.observations(self.arm, key)

    def usual_acceptance(self, key: Key) -> float | None:
        """Return the tokens per step of a drafter in order; None if similar requests are not known well enough."""
        model = self.fitted.acceptance
        if model.observations_of_kind(self.arm, key) < _MIN_OBSERVATIONS:
            return None
        return model.tokens_per_step(self.arm, self.name, key)


_MIN_OBSERVATIONS: Final = 20.0
_NO_REPORT: Final = EngineLoad()
