"""What is known of each backend: what was fitted to it, and what it is at work on."""

from __future__ import annotations

import copy
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


@dataclass(slots=True)
class FittedModels:
    """Everything that was fitted; replaced whole by the next fit.

    Parameters
    ----------
    steps
        By backend; one that is not there is expected to be as its method on the calibration's machine.
    observed
        By backend, how many requests `steps` were fitted to.
    """

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    length: LengthModel = field(default_factory=LengthModel)
    steps: Mapping[str, StepCost] = field(default_factory=dict)
    observed: Mapping[str, float] = field(default_factory=dict)


class BackendModel:
    """What is known of one backend.

    What each request reads of its costs and of its engine's report is held number by number: compiled, those are read
    in no time, where an attribute of an interpreted object takes as long as five multiplications.

    Attributes
    ----------
    prior
        Its step costs on the calibration's machine.
    cost
        Its step costs, as far as they were learned.
    observed
        How many requests they were fitted to.
    spread
        Standard deviation of log tokens per step around what is expected of a request on its arm.
    slowness
        By how much its latest steps were slower than its fit has it; 1 where nothing is noted.
    load
        What its engine reported when a prediction was last made; `waiting`, `others` and `reported_s` are of it.
    """

    def __init__(self, name: str, arm: str, prior: StepCost, fitted: FittedModels, prefixes: BackendPrefixes) -> None:
        self.name = name
        self.arm = arm
        self.prior = prior
        self.backlog = Backlog()
        self.prefixes = prefixes
        self.slowness = 1.0
        self.learn(fitted)
        self.read(_NO_REPORT)

    def learn(self, fitted: FittedModels) -> None:
        """Take over what was fitted."""
        self.fitted = fitted
        self.cost = fitted.steps.get(self.name, self.prior)
        self.observed = fitted.observed.get(self.name, 0.0)
        self.spread = fitted.acceptance.spread(self.arm)
        self.base_s, self.per_request_s, self.per_context_token_s, self.per_prompt_token_s = self.cost

    def read(self, load: EngineLoad) -> None:
        """Take over what the engine reports."""
        self.load = load
        self.waiting, self.others, self.reported_s = load.waiting, load.others, load.at_s

    def acceptance(self, key: Key) -> tuple[float, float]:
        """Return the tokens per step to be expected, and how often requests like this one were seen on its arm."""
        model = self.fitted.acceptance
        return model.tokens_per_step(self.arm, self.name, key), model.seen(self.arm, key)

    def dry_run_copy(self) -> BackendModel:
        """Return a copy; what is sent there changes nothing here."""
        other = BackendModel(self.name, self.arm, self.prior, self.fitted, self.prefixes.dry_run_copy())
        other.backlog, other.slowness = copy.copy(self.backlog), self.slowness
        return other


_NO_REPORT: Final = EngineLoad()
