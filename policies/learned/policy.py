"""The `learned` policy: the lowest predicted total delay, with bounded exploration and a guardrail."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from random import Random

from pydantic import Field

from backends.backend import Candidate, EngineChange
from policies.drafter_limits import sparing
from policies.features.request import TEXT_FEATURES, RequestFeatures
from policies.guarded.guardrail import Guardrail
from policies.guarded.outlier_ejection import OutlierEjection
from policies.guarded.silent_drafters import SilentDrafters
from policies.learned.cost import Cost, cost_of
from policies.learned.models import step_time
from policies.learned.models.acceptance import ACCEPTANCE, BACKEND, AcceptanceModel
from policies.learned.models.backend_model import FittedModels
from policies.learned.models.keys import Templates, fitted_templates
from policies.learned.models.length import LENGTH, LengthModel
from policies.learned.models.prior import StepCost, known_to_tokens
from policies.learned.models.step_time import STEPS
from policies.learned.predict import Predictor
from policies.learned.select import Chooser
from policies.learned.settings import Exploration, PredictingSettings
from policies.learned.shadow_drafting import ShadowBias
from policies.learned.update import Observer
from policies.load import LoadMeter
from policies.policy import Assessment, Decision, Outcome, Policy, register
from policies.roles import Price, Stateful, Work, assess, preview
from policies.statistics import Statistics
from policies.trouble.troubles import TROUBLE, Troubles


class LearnedSettings(PredictingSettings):
    """The objective of `learned`, and the limits of its learning."""

    exploration: Exploration = Field(default=Exploration(), description="Limits of exploration.")

    def cost(self) -> Cost:
        """Return the cost function of the objective."""
        return cost_of(self.objective, *self.slo.seconds)


@register
class Learned(Policy):
    """A policy that picks the backend with the lowest predicted total delay: of the request and of those it slows."""

    name = "learned"
    Settings = LearnedSettings
    settings: LearnedSettings
    text_features = TEXT_FEATURES
    prices_limits = True

    def __init__(self, settings: LearnedSettings) -> None:
        super().__init__(settings)
        self.meter = LoadMeter(settings.stale_after_s)
        self.rng = Random(settings.seed)
        self.clock: Callable[[], float] = time.time
        self.statistics: Statistics = Statistics((ACCEPTANCE, LENGTH, STEPS, TROUBLE), self.clock)
        self.troubles = Troubles(self.statistics)
        self.predictor = Predictor(self.meter, settings.calibration)
        self.guardrail = Guardrail(settings.guardrail)
        self.outlier_ejection = OutlierEjection(ejects=settings.outlier_ejection)
        self.drafters = SilentDrafters()
        self.templates = Templates()
        self.shadow = settings.shadow_drafting
        self._shadow_bias = ShadowBias()
        self.cost = settings.cost()
        self.explain_candidates = False
        self.pinned: Policy | None = None
        """Policy that decides instead, while this one continues to learn."""
        self._fitted_version = 0, 0
        self._pending: FittedModels | None = None
        self._assemble()

    def _assemble(self) -> None:
        """Build the chooser and the observer; needed again whenever a part is replaced."""
        self._chooser = Chooser(
            self.name,
            self.predictor,
            self.guardrail,
            self.outlier_ejection,
            self.cost,
            self.settings.exploration,
            self.templates,
            self.troubles,
        )
        self._observer = Observer(
            self.predictor,
            self.guardrail,
            self.outlier_ejection,
            self.drafters,
            self.statistics,
            self._shadow_bias,
            self.templates,
        )

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock, which returns seconds."""
        self.clock = self.statistics.clock = clock

    def take_over(self, previous: Policy) -> None:
        """Continue with the statistics of another policy that has some, and with all the rest of another `learned`."""
        if isinstance(previous, Stateful) and previous.statistics.tables == self.statistics.tables:
            self.statistics = self.troubles.statistics = previous.statistics
        if isinstance(previous, Learned):
            self.set_clock(previous.clock)
            self.predictor.take_over(previous.predictor)
            self.templates = previous.templates
            if self.predictor.backend_models:  # else nothing is expected of them yet
                self.drafters = previous.drafters
            self._shadow_bias, self.pinned = previous._shadow_bias, previous.pinned
            if previous.settings.guardrail == self.settings.guardrail:
                self.guardrail = previous.guardrail
            if previous.settings.outlier_ejection == self.settings.outlier_ejection:
                self.outlier_ejection = previous.outlier_ejection
        self._assemble()

    def forget(self, backend: str) -> None:
        """Drop what is kept of a backend that has left; the statistics stay, and age."""
        self.predictor.forget(backend)
        self.outlier_ejection.forget(backend)
        self.drafters.forget(backend)

    def engine_changed(self, backend: str, change: EngineChange) -> None:
        """Judge the drafter of a backend anew, and forget what its engine had cached, and the speed of another one."""
        if change is EngineChange.SPECULATION:  # to us it is another backend under the same name
            self.forget(backend)
            return
        if change is EngineChange.RESTART:
            self.outlier_ejection.forget(backend)
        if change is EngineChange.RELOAD:
            self.statistics.drop(STEPS, lambda key: key[0] == backend)
        if (model := self.predictor.backend_models.get(backend)) is not None:
            model.prefixes.clear()
        if self.drafters.renew(backend, change):
            self.predictor.set_silent(backend, False)

    def sent_elsewhere(self, backend: str, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Remember that a backend has a prompt which another gateway has sent."""
        if (model := self.predictor.backend_models.get(backend)) is not None:
            model.hear(prefixes, lengths, self.clock(), self.predictor.attention)

    def evicted(self, backend: str, unused_s: float | None, is_full: bool) -> None:
        """Forget what was not used for so many seconds, as an engine tells of its cache; None if it tells nothing."""
        if (model := self.predictor.backend_models.get(backend)) is not None:
            model.prefixes.evicted(None if unused_s is None else self.clock() - unused_s, is_full)

    def correct(self, backend: str, factor: float) -> None:
        """Multiply the tokens per step of a backend's answers; what was learned from them before is dropped."""
        corrections = self.predictor.corrections
        if backend not in corrections and factor != 1.0:
            self.statistics.drop(ACCEPTANCE, lambda key: key[BACKEND] == backend)
            self.statistics.drop(STEPS, lambda key: key[0] == backend)
        corrections[backend] = factor
        if factor == 1.0:
            del corrections[backend]

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate of the lowest cost, or sometimes another one, to explore or for the guardrail."""
        if self.pinned is not None:
            spared = self.troubles.sparing(request, sparing(request, candidates))
            return self.follow(self.pinned.choose(request, spared), request, candidates)
        if self._pending is not None:
            self._publish_fit()
        return self._chooser.choose(request, candidates, self.clock(), self.rng, self.explain_candidates)

    def follow(self, decision: Decision, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return another policy's decision in a form from whose outcome this policy learns."""
        self._publish_fit()
        return self._chooser.follow(decision, request, candidates, self.clock())

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return the decision that `choose` would make now."""
        if self.pinned is not None:
            spared = self.troubles.sparing(request, sparing(request, candidates), is_sent=False)
            return preview(self.pinned, request, spared)
        self._publish_fit()
        rng = copy.copy(self.rng)
        return self._chooser.choose(request, candidates, self.clock(), rng, self.explain_candidates, send=False)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate by its cost in seconds, with the parts of the prediction."""
        if self.pinned is not None:
            return assess(self.pinned, request, candidates)
        self._publish_fit()
        self.predictor.now_s = now_s = self.clock()
        self._chooser.update_slowness(now_s)
        predictions = self.predictor.predict(request, self.templates.key(request, counts=False), candidates)
        costs, _ = self.cost.of(request, predictions)
        self.troubles.price(request, candidates, costs, is_sent=False)
        assessments = []
        for candidate, prediction, cost in zip(candidates, predictions, costs, strict=True):
            note = (
                f"first token {prediction.ttft_s:.3f} s, the rest {prediction.decode_s:.3f} s "
                f"({prediction.output_tokens:.0f} tokens, {prediction.tokens_per_step:.2f} per step of "
                f"{1e3 * prediction.step_s:.1f} ms), others delayed by {prediction.others_s:.3f} s"
            )
            if cached := int(request.prompt_tokens - prediction.prompt_tokens):
                goes_by = self.predictor.backend_models[candidate.name].prefixes.goes_by
                note += f"; {cached:,} tokens of the prompt cached, by {goes_by}"
            known = known_to_tokens(self.settings.calibration, candidate.method)
            if prediction.context_tokens > known:
                note += f"; its acceptance is published for up to {known:,.0f} tokens of context"
            if (slowness := self.predictor.backend_models[candidate.name].slowness) > 1.0:
                note += f"; counts as {slowness:.1f} times slow, as its last steps were"
            if candidate.name in self.outlier_ejection.reasons:
                note += f"; ejected as an outlier: {self.outlier_ejection.reasons[candidate.name]}"
            if candidate.name in self.drafters.silent:
                note += f"; {self.drafters.silent[candidate.name]}"
            assessments.append(Assessment(candidate.name, cost, note))
        return assessments

    def price(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Price:
        """Return what a request costs where that is least: its own time without waiting, and the delay of others."""
        key = self.templates.key(request, counts=False)
        self.predictor.now_s = self.clock()
        predictions = self.predictor.predict(request, key, candidates)
        one = min(predictions, key=lambda each: each.prefill_s + each.decode_s + each.others_s)
        tokens = max(1.0, one.output_tokens * request.n)
        prompt_s = (1 + one.requests) * one.prefill_s
        rest_s = max(0.0, one.prefill_s + one.decode_s + one.others_s - prompt_s)
        return Price(prompt_s, rest_s / tokens, tokens, one.prefill_s)

    def _publish_fit(self) -> None:
        """Take over the models of a fit that has ended."""
        if self._pending is not None:
            self.predictor.learn(self._pending)
            self.templates.learn(self._pending.templates)
            self._pending = None

    def observe(self, outcome: Outcome) -> None:
        """Add an outcome to the statistics, and compare it with its prediction."""
        self._observer.observe(outcome, self.clock())

    def observe_shadow(self, outcome: Outcome) -> None:
        """Learn from shadow drafting on a request that was observed when it finished."""
        self._observer.observe_shadow(outcome, self.clock())

    def warm_up(self) -> None:
        """Import the libraries for fitting and distilling, which takes a second and would delay requests."""
        for library in ("scipy.optimize", "scipy.sparse", "sklearn.linear_model", "sklearn.tree"):
            import_module(library)

    def maintenance(self) -> Work | None:
        """Return a fit of the models if there are new observations or backends, else None."""
        version = self.statistics.observations, len(self.predictor.backend_models)
        if version == self._fitted_version:
            return None
        self._fitted_version = version
        priors = {name: model.prior for name, model in self.predictor.backend_models.items()}

        def fit(pause: Callable[[], object] = lambda: None, /) -> None:
            self._pending = self.fitted(priors, pause)

        return fit

    def fitted(self, priors: Mapping[str, StepCost], pause: Callable[[], object] = lambda: None) -> FittedModels:
        """Return models fitted to the statistics; may be called in any thread, as it changes nothing here."""
        buckets = self.statistics.buckets
        acceptance = AcceptanceModel.fit(buckets(ACCEPTANCE), self.settings.calibration, pause)
        pause()
        lengths = buckets(LENGTH)
        length = LengthModel.fit(lengths)
        templates = fitted_templates(lengths)
        pause()
        sums = buckets(STEPS)
        steps = step_time.fit_steps(sums, priors, pause)
        observed = {name: total[0] for name, total in step_time.of_backends(sums).items() if name in priors}
        return FittedModels(acceptance, length, steps, observed, templates, step_time.fit_levels(sums, steps))
