"""Routing by what was learned: the least delay to everybody, with bounded exploration and a guardrail."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from backends.backend import Candidate
from backends.simulator.calibration import calibration_names
from policies import steptime
from policies.acceptance import ACCEPTANCE, AcceptanceModel
from policies.backlog import Mark
from policies.cells import Key, key_of
from policies.chances import draw, mixed, of_least_loaded, of_the_least, told
from policies.experience import Experience
from policies.exploration import explore
from policies.fixed import LoadPolicy, LoadSettings
from policies.guardrail import Guardrail
from policies.learned_settings import Exploration, GuardrailSettings
from policies.length import LENGTH, SHORTEST_SEEN_TOKENS, LengthModel
from policies.lookups import LookupBias, LookupSettings
from policies.objective import Cost, Objective, cost_of
from policies.policy import Assessment, Decision, Outcome, Policy, register
from policies.predict import Knowledge, Prediction, Predictor
from policies.prior import DEFAULT_CALIBRATION, StepCost
from policies.quarantine import Quarantine
from policies.request import TEXT_FEATURES, RequestFeatures
from policies.steptime import STEPS


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
    lookups: LookupSettings = Field(
        default=LookupSettings(),
        description="Replaying n-gram and suffix lookups on finished texts, which tells their acceptance for nothing.",
    )

    @field_validator("calibration")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in calibration_names():
            raise ValueError(f"no calibration is called {name!r}; known are {', '.join(calibration_names())}")
        return name


@dataclass(slots=True)
class Memo:
    """What was thought of a request when it was sent, to be compared with what came of it.

    Parameters
    ----------
    control
        It went where `least_loaded` would send it; None if rules decided, which takes no part in the comparison.
    """

    key: Key
    prediction: Prediction
    mark: Mark
    control: bool | None


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
        self.experience: Experience = Experience((ACCEPTANCE, LENGTH, STEPS), self.clock)
        self.predictor = Predictor(self.meter, settings.calibration)
        self.guardrail = Guardrail(settings.guardrail)
        self.quarantine = Quarantine()
        self._slow: set[str] = set()
        self.lookups = settings.lookups
        self._lookup_bias = LookupBias()
        slo = settings.slo
        self._cost = cost_of(settings.objective, _seconds(slo.ttft_ms), _seconds(slo.tpot_ms))
        self.pinned: Policy | None = None
        """Decides instead, while this policy goes on learning."""
        self._fitted = 0, 0
        self._fresh: Knowledge | None = None

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Live in another time."""
        self.clock = self.experience.clock = clock

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate of the least cost, or now and then another one, to learn or to compare."""
        now_s = self.clock()
        if self._slow:
            self._fade(now_s)
        if self._fresh is not None:
            self.predictor.learn(self._fresh)
            self._fresh = None
        if self.pinned is not None:
            return self._choose_pinned(self.pinned, request, candidates, now_s)
        eligible = self.quarantine.admit(candidates, now_s)
        key = key_of(request)
        predictor = self.predictor
        predictions = predictor.predict(request, key, eligible, now_s)
        costs = [self._cost(request, prediction) for prediction in predictions]
        if request.explore and len(costs) > 1:
            learned = explore(self.settings.exploration, costs, [prediction.seen for prediction in predictions])
        else:
            learned = of_the_least(costs)
        guardrail = self.guardrail
        control_share = guardrail.control_share() if request.explore or guardrail.frozen else 0.0
        chances = control = learned
        if control_share:
            control = of_least_loaded(eligible, predictions)
            chances = mixed(learned, control, control_share)
        by_control = control_share > 0 and guardrail.draw(self.rng)
        chosen = draw(control if by_control else learned, self.rng)
        if by_control:
            reason = "frozen" if guardrail.frozen else "control"
        else:
            reason = "least_delay" if costs[chosen] <= min(costs) else "explore"
        backend, prediction = eligible[chosen].name, predictions[chosen]
        mark = predictor.known[backend].backlog.send(prediction.share, now_s)
        if request.prefix:
            predictor.prefixes.remember(backend, request)
        return Decision(
            backend,
            self.name,
            reason,
            chances[chosen],
            told(eligible, predictions, chances) if self.tells_considered else None,
            Memo(key, prediction, mark, by_control),
        )

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Tell the cost of each candidate in seconds, and what it is made of."""
        if self.pinned is not None:
            return self.pinned.assess(request, candidates)
        key = key_of(request)
        assessments = []
        predictions = self.predictor.predict(request, key, candidates, self.clock())
        for candidate, prediction in zip(candidates, predictions, strict=True):
            note = (
                f"first token {prediction.ttft_s:.3f} s, the rest {prediction.decode_s:.3f} s "
                f"({prediction.output_tokens:.0f} tokens, {prediction.tokens_per_step:.2f} a step of "
                f"{1e3 * prediction.step_s:.1f} ms), others delayed by {prediction.others_s:.3f} s"
            )
            if candidate.name in self.quarantine.reasons:
                note += f"; in quarantine: {self.quarantine.reasons[candidate.name]}"
            assessments.append(Assessment(candidate.name, self._cost(request, prediction), note))
        return assessments

    def rehearsal(self) -> Self:
        """Return a copy of what choosing changes; what was learned is the same."""
        other = copy.copy(self)
        other.rng = copy.copy(self.rng)
        other.predictor = self.predictor.rehearsal()
        other.quarantine = copy.deepcopy(self.quarantine)
        other._slow = set(self._slow)
        other.pinned = None if self.pinned is None else self.pinned.rehearsal()
        return other

    def observe(self, outcome: Outcome) -> None:
        """Add what a request came to to the experience, and compare it with what was expected."""
        memo = outcome.decision.memo if isinstance(outcome.decision.memo, Memo) else None
        now_s = self.clock()
        backend = outcome.decision.backend
        if memo is not None:
            backlog = self.predictor.known[backend].backlog
            backlog.look(now_s, backlog.requests)
            backlog.end(memo.prediction.share)
        if outcome.status != _OK or outcome.output_tokens < 1:
            return
        key = memo.key if memo is not None else key_of(outcome.request)
        self._observe_length(outcome, key)
        steps = self._observe_acceptance(outcome, key, memo)
        if memo is not None:
            self._observe_step(outcome, memo, steps, now_s)
            if memo.control is not None:
                work = outcome.output_tokens + _WORK_OF_PROMPT * outcome.prompt_tokens
                self.guardrail.observe(outcome.e2e_s / work, control=memo.control)
            if outcome.cached_tokens is not None:
                self.predictor.prefixes.learn(
                    backend, outcome.request.prompt_tokens - memo.prediction.prompt_tokens, outcome.cached_tokens
                )

    def observe_lookups(self, outcome: Outcome) -> None:
        """Note what lookups would have given, but for the method that was at work: its engine has told itself."""
        memo = outcome.decision.memo if isinstance(outcome.decision.memo, Memo) else None
        key = memo.key if memo is not None else key_of(outcome.request)
        much_longer = memo is not None and _is_much_longer(outcome, memo.prediction)
        known, told = self.predictor.known.get(outcome.decision.backend), outcome.tokens_per_step
        for arm, replayed in outcome.lookups.items():
            if known is not None and arm == known.arm and told is not None:
                self._lookup_bias.compare(arm, told, replayed)
                continue
            tokens_per_step = self._lookup_bias.corrected(arm, replayed)
            if not (much_longer and self._is_too_good(arm, "", key, tokens_per_step)):
                self._add_acceptance(arm, "", key, tokens_per_step)

    def prepare(self) -> None:
        """Load the libraries that fit and distil: a second of work that requests would meet."""
        for library in ("scipy.optimize", "scipy.sparse", "sklearn.linear_model", "sklearn.tree"):
            import_module(library)

    def upkeep(self) -> Callable[[], None] | None:
        """Fit again what there are new observations of."""
        seen = self.experience.observations, len(self.predictor.known)
        if seen == self._fitted:
            return None
        self._fitted = seen
        priors = {name: known.prior for name, known in self.predictor.known.items()}

        def fit() -> None:
            self._fresh = self.fitted(priors)

        return fit

    def fitted(self, priors: Mapping[str, StepCost]) -> Knowledge:
        """Fit everything to what was observed; in any thread, for it changes nothing here.

        Parameters
        ----------
        priors
            What is expected of each backend, by name.
        """
        cells = self.experience.cells
        steps = cells(STEPS)
        return Knowledge(
            AcceptanceModel.fit(cells(ACCEPTANCE), self.settings.calibration),
            LengthModel.fit(cells(LENGTH)),
            steptime.fit_steps(steps, priors),
            {name: steps[name,][0] for name in priors if (name,) in steps},
        )

    @property
    def cost(self) -> Cost:
        """What is minimised."""
        return self._cost

    def _choose_pinned(
        self, pinned: Policy, request: RequestFeatures, candidates: Sequence[Candidate], now_s: float
    ) -> Decision:
        self.quarantine.admit(candidates, now_s)  # rules know of none; but who was out is let in again in time
        decision = pinned.choose(request, candidates)
        chosen = [one for one in candidates if one.name == decision.backend]
        key, predictor = key_of(request), self.predictor
        (prediction,) = predictor.predict(request, key, chosen, now_s)
        mark = predictor.known[decision.backend].backlog.send(prediction.share, now_s)
        if request.prefix:
            predictor.prefixes.remember(decision.backend, request)
        return replace(decision, memo=Memo(key, prediction, mark, None))

    def _observe_length(self, outcome: Outcome, key: Key) -> None:
        log_tokens = math.log(max(SHORTEST_SEEN_TOKENS, outcome.output_tokens / outcome.request.n))
        self.experience.add(LENGTH, key, 1.0, log_tokens, log_tokens**2)

    def _observe_acceptance(self, outcome: Outcome, key: Key, memo: Memo | None) -> float | None:
        """Note tokens per step, and return how many steps the answer took, if that is known."""
        if outcome.lookups:
            self.observe_lookups(outcome)
        much_longer = memo is not None and _is_much_longer(outcome, memo.prediction)
        per_step, backend = outcome.tokens_per_step, outcome.decision.backend
        if per_step is None or outcome.output_tokens < _FEWEST_TOKENS:
            return None
        known = self.predictor.known.get(backend)
        runaway = known is not None and much_longer and self._is_too_good(known.arm, backend, key, per_step)
        if known is not None and not runaway:
            self._add_acceptance(known.arm, backend, key, per_step)
        return outcome.output_tokens / outcome.request.n / per_step

    def _is_too_good(self, arm: str, backend: str, key: Key, tokens_per_step: float) -> bool:
        """Return whether a much longer answer repeats itself: lookups are brilliant at that, and at nothing like it."""
        expected = self.predictor.knowledge.acceptance.tokens_per_step(arm, backend, key)
        return tokens_per_step > _RUNAWAY_PER_STEP * expected

    def _add_acceptance(self, arm: str, backend: str, key: Key, tokens_per_step: float) -> None:
        log_tokens = math.log(max(1.0, tokens_per_step))
        self.experience.add(ACCEPTANCE, (arm, backend, *key), 1.0, log_tokens, log_tokens**2)

    def _observe_step(self, outcome: Outcome, memo: Memo, steps: float | None, now_s: float) -> None:
        """Note the mean time of a step under the mean load that it met."""
        prediction, known = memo.prediction, self.predictor.known[outcome.decision.backend]
        step_ratio = None
        decode_s = None if outcome.tpot_s is None else outcome.tpot_s * (outcome.output_tokens - 1)
        if steps is not None and decode_s is not None and steps > _FEWEST_STEPS and decode_s > 0:
            requests, context, prompt_tokens = known.backlog.since(memo.mark, now_s)
            load = steptime.terms(requests, context, prompt_tokens / steps)
            expected_s = steptime.seconds(known.cost, load)
            step_s = decode_s / (steps - 1)
            self.experience.add(STEPS, (known.name,), *steptime.observation(step_s, load, known.prior, expected_s))
            if self.predictor.knowledge.observed.get(known.name, 0.0) >= _FEWEST_OBSERVED:
                step_ratio = step_s / expected_s
        per_step = outcome.tokens_per_step
        acceptance_ratio = None
        if per_step is not None and prediction.seen >= _FEWEST_OBSERVED:
            acceptance_ratio = per_step / prediction.tokens_per_step
        spread = self.predictor.knowledge.acceptance.spread(known.arm)
        known.slowness = self.quarantine.observe(known.name, step_ratio, acceptance_ratio, now_s, spread)
        if known.slowness > 1.0:
            self._slow.add(known.name)

    def _fade(self, now_s: float) -> None:
        """Let slowness fade that no request has confirmed."""
        for name in [*self._slow]:
            known = self.predictor.known[name]
            known.slowness = self.quarantine.slowness(name, now_s)
            if known.slowness < _HARDLY_SLOW:
                known.slowness = 1.0
                self._slow.discard(name)


def _is_much_longer(outcome: Outcome, prediction: Prediction) -> bool:
    """Return whether an answer is so much longer than expected that it may be repeating itself without end."""
    return outcome.output_tokens / outcome.request.n > _RUNAWAY * prediction.output_tokens


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else 1e-3 * milliseconds


_OK = 200
_FEWEST_TOKENS = 8
_FEWEST_STEPS = 4.0
_HARDLY_SLOW = 1.01
_FEWEST_OBSERVED = 20.0
"""Before that, a backend that is unlike what is expected of its method may well be right."""
_RUNAWAY = 4.0
_RUNAWAY_PER_STEP = 1.5
_WORK_OF_PROMPT = 0.02
"""Of a token of the prompt, beside one of the answer: computed thousands at a time."""
