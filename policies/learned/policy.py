"""Routing by what was learned: the least delay to everybody, with bounded exploration and a guardrail."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from backends.backend import Candidate
from backends.calibration.calibration import calibration_names
from policies.features.request import TEXT_FEATURES, RequestFeatures
from policies.learned.cost import cost_of
from policies.learned.guardrail import Guardrail
from policies.learned.models import step_time
from policies.learned.models.acceptance import ACCEPTANCE, AcceptanceModel
from policies.learned.models.backend_model import FittedModels
from policies.learned.models.buckets import key_of
from policies.learned.models.length import LENGTH, LengthModel
from policies.learned.models.prior import DEFAULT_CALIBRATION, StepCost
from policies.learned.models.step_time import STEPS
from policies.learned.outlier_ejection import OutlierEjection
from policies.learned.predict import Predictor
from policies.learned.select import Chooser
from policies.learned.settings import Exploration, GuardrailSettings, Objective
from policies.learned.shadow_drafting import ShadowBias, ShadowSettings
from policies.learned.update import Observer
from policies.load_balancing import LoadPolicy, LoadSettings
from policies.policy import Assessment, Decision, Outcome, Policy, Work, register
from policies.statistics import Statistics


class Slo(BaseModel):
    """Bounds for requests that bring none of their own, and whose key has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_ms: float | None = Field(default=None, gt=0, description="Milliseconds to the first token.")
    tpot_ms: float | None = Field(default=None, gt=0, description="Milliseconds per output token after it.")


class LearnedSettings(LoadSettings):
    """What is minimised, and how much of the traffic may be used to learn."""

    objective: Objective = Field(
        default=Objective.LATENCY,
        description="What is minimised: `latency` (everybody's time to finish), `ttft`, `tpot`, or `goodput`, "
        "the share of requests that keep their SLO.",
    )
    slo: Slo = Field(default=Slo(), description="Bounds for `goodput`, for requests that bring none.")
    calibration: str = Field(
        default=DEFAULT_CALIBRATION,
        description="What is expected of backends before they were seen: one of the simulator's calibrations. Its "
        "speed is learned at once; that its methods stand to each other as on your machine is what it adds.",
    )
    exploration: Exploration = Field(default=Exploration(), description="How much is spent on learning.")
    guardrail: GuardrailSettings = Field(default=GuardrailSettings(), description="Comparison with `least_loaded`.")
    shadow_drafting: ShadowSettings = Field(
        default=ShadowSettings(),
        description="Replaying n-gram and suffix lookups on finished texts, which tells their acceptance for nothing.",
    )

    @field_validator("calibration")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in calibration_names():
            raise ValueError(f"no calibration is called {name!r}; known are {', '.join(calibration_names())}")
        return name


@register
class Learned(LoadPolicy):
    """Sends each request where it delays everybody least, itself and those already there, by what was learned."""

    name = "learned"
    Settings = LearnedSettings
    settings: LearnedSettings
    text_features = TEXT_FEATURES

    def __init__(self, settings: LearnedSettings) -> None:
        super().__init__(settings)
        self.clock: Callable[[], float] = time.time
        self.statistics: Statistics = Statistics((ACCEPTANCE, LENGTH, STEPS), self.clock)
        self.predictor = Predictor(self.meter, settings.calibration)
        self.guardrail = Guardrail(settings.guardrail)
        self.outlier_ejection = OutlierEjection()
        self.shadow = settings.shadow_drafting
        self._lookup_bias = ShadowBias()
        slo = settings.slo
        self.cost = cost_of(settings.objective, _seconds(slo.ttft_ms), _seconds(slo.tpot_ms))
        """What is minimised."""
        self.pinned: Policy | None = None
        """Decides instead, while this policy goes on learning."""
        self._fitted = 0, 0
        self._fresh: FittedModels | None = None
        self._join()

    def _join(self) -> None:
        """Join the parts for what each request goes through, which is compiled; again where one is replaced."""
        self._chooser = Chooser(
            self.name,
            self.predictor,
            self.guardrail,
            self.outlier_ejection,
            self.cost,
            self.settings.exploration,
            self.rng,
        )
        self._observer = Observer(
            self.predictor, self.guardrail, self.outlier_ejection, self.statistics, self._lookup_bias
        )

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Live in another time."""
        self.clock = self.statistics.clock = clock

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate of the least cost, or now and then another one, to learn or to compare."""
        if self._fresh is not None:
            self.predictor.learn(self._fresh)
            self._fresh = None
        if self.pinned is None:
            return self._chooser.choose(request, candidates, self.clock(), self.explain_candidates)
        return self._chooser.follow(self.pinned.choose(request, candidates), request, candidates, self.clock())

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Tell the cost of each candidate in seconds, and what it is made of."""
        if self.pinned is not None:
            return self.pinned.assess(request, candidates)
        key, cost = key_of(request), self.cost.dry_run_copy()
        assessments = []
        predictions = self.predictor.predict(request, key, candidates, self.clock())
        for candidate, prediction in zip(candidates, predictions, strict=True):
            note = (
                f"first token {prediction.ttft_s:.3f} s, the rest {prediction.decode_s:.3f} s "
                f"({prediction.output_tokens:.0f} tokens, {prediction.tokens_per_step:.2f} a step of "
                f"{1e3 * prediction.step_s:.1f} ms), others delayed by {prediction.others_s:.3f} s"
            )
            if candidate.name in self.outlier_ejection.reasons:
                note += f"; ejected as an outlier: {self.outlier_ejection.reasons[candidate.name]}"
            assessments.append(Assessment(candidate.name, cost.of(request, prediction), note))
        return assessments

    def dry_run_copy(self) -> Self:
        """Return a copy of what choosing changes; what was learned is the same."""
        other = copy.copy(self)
        other.rng = copy.copy(self.rng)
        other.predictor = self.predictor.dry_run_copy()
        other.outlier_ejection = self.outlier_ejection.dry_run_copy()
        other.cost = self.cost.dry_run_copy()
        other.pinned = None if self.pinned is None else self.pinned.dry_run_copy()
        other._join()
        return other

    def observe(self, outcome: Outcome) -> None:
        """Add what a request came to to the experience, and compare it with what was expected."""
        self._observer.observe(outcome, self.clock())

    def observe_shadow(self, outcome: Outcome) -> None:
        """Note what lookups would have given, but for the method that was at work: its engine has told itself."""
        self._observer.observe_shadow(outcome, self.clock())

    def warm_up(self) -> None:
        """Load the libraries that fit and distil: a second of work that requests would meet."""
        for library in ("scipy.optimize", "scipy.sparse", "sklearn.linear_model", "sklearn.tree"):
            import_module(library)

    def maintenance(self) -> Work | None:
        """Fit again what there are new observations of."""
        seen = self.statistics.observations, len(self.predictor.known)
        if seen == self._fitted:
            return None
        self._fitted = seen
        priors = {name: known.prior for name, known in self.predictor.known.items()}

        def fit(pause: Callable[[], object] = lambda: None, /) -> None:
            self._fresh = self.fitted(priors, pause)

        return fit

    def fitted(self, priors: Mapping[str, StepCost], pause: Callable[[], object] = lambda: None) -> FittedModels:
        """Fit everything to what was observed; in any thread, for it changes nothing here.

        Parameters
        ----------
        priors
            What is expected of each backend, by name.
        pause
            Called between the parts, see `policies.policy.Work`.
        """
        buckets = self.statistics.buckets
        acceptance = AcceptanceModel.fit(buckets(ACCEPTANCE), self.settings.calibration, pause)
        pause()
        length = LengthModel.fit(buckets(LENGTH))
        pause()
        sums = buckets(STEPS)
        steps = step_time.fit_steps(sums, priors, pause)
        return FittedModels(acceptance, length, steps, {name: sums[name,][0] for name in priors if (name,) in sums})


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else 1e-3 * milliseconds
