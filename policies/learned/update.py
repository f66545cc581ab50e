"""What `learned` learns from a finished request, kept apart from the policy so that mypyc can compile it."""

from __future__ import annotations

import math
from typing import Final

from policies.decision import Outcome
from policies.guarded.evidence import UNCOUNTED
from policies.guarded.guardrail import Guardrail, kind_of, work_of
from policies.guarded.outlier_ejection import OutlierEjection
from policies.guarded.silent_drafters import LEAST_TOKENS, SilentDrafters
from policies.learned.models import step_time
from policies.learned.models.acceptance import ACCEPTANCE
from policies.learned.models.backend_model import BackendModel, Prediction
from policies.learned.models.depth import Place
from policies.learned.models.keys import Key, Templates
from policies.learned.models.length import LENGTH
from policies.learned.models.prefix_memory import ESTIMATE
from policies.learned.models.step_time import STEPS
from policies.learned.predict import Predictor
from policies.learned.select import Memo
from policies.learned.shadow_drafting import ShadowBias
from policies.statistics import Statistics


class Observer:
    """Adds outcomes to the statistics, and compares them with their predictions."""

    def __init__(
        self,
        predictor: Predictor,
        guardrail: Guardrail,
        outlier_ejection: OutlierEjection,
        drafters: SilentDrafters,
        statistics: Statistics,
        shadow_bias: ShadowBias,
        templates: Templates,
    ) -> None:
        self._predictor = predictor
        self._guardrail = guardrail
        self._outlier_ejection = outlier_ejection
        self._drafters = drafters
        self._statistics = statistics
        self._shadow_bias = shadow_bias
        self._templates = templates

    def observe(self, outcome: Outcome, now_s: float) -> None:
        """Learn from a finished request."""
        memo, request = _memo(outcome), outcome.request
        model = self._predictor.backend_models.get(outcome.decision.backend)
        is_beyond = model is not None and model.reach.is_beyond(outcome)
        if memo is not None and model is not None:
            backlog = model.backlog
            backlog.update(now_s, backlog.requests)
            backlog.end(memo.prediction, is_beyond and model.reach.harms_others)
        if outcome.status != _OK or outcome.output_tokens < 1:
            return
        key = memo.key if memo is not None else self._templates.key(request, counts=False)
        log_tokens = self._predictor.fitted.length.log_seen(request, key, outcome.output_tokens / request.n)
        weight = _ESTIMATE_WEIGHT if outcome.is_estimated else 1.0
        sums = (weight, weight * log_tokens, weight * log_tokens**2)
        self._statistics.add_at(now_s, LENGTH, key, sums)
        if outcome.shadow:
            self.observe_shadow(outcome, now_s)
        if model is None:
            return
        answered = self._per_step(outcome, model)
        per_step = answered if outcome.output_tokens >= _MIN_TOKENS else None
        place = _place(outcome, memo, model, now_s)
        is_drafted = not is_beyond and model.backlog.was_drafted(now_s - outcome.e2e_s)
        teaches = is_drafted or not model.reach.is_known  # what has no known cause is learned, but accuses nobody
        accuses = is_drafted and not (model.others and model.reach.is_known and model.reach.harms_others)
        if is_drafted and answered is not None and (reach := model.reach).is_known:
            reach.per_step += (_NEW if reach.per_step else 1.0) * (answered - reach.per_step)
        if teaches and per_step is not None:
            self._observe_drafter(outcome, memo, model, key, per_step, place, now_s, accuses)
        if memo is None:
            return
        step_ratio = self._step_ratio(outcome, memo, model, per_step, place, now_s, teaches)
        self._observe_speed(outcome, memo, model, step_ratio, answered if accuses else None, place, now_s)
        if memo.compared and not outcome.was_paused:
            self._guardrail.observe(now_s, outcome.e2e_s, work_of(outcome), kind_of(request))
        self._observe_prompt(outcome, memo.prediction, model)
        if outcome.cached_tokens is not None:
            expected = request.prompt_tokens - memo.prediction.prompt_tokens
            model.prefixes.learn(expected, outcome.cached_tokens)
        if model.prefixes.goes_by is not ESTIMATE:  # what it evicts depends on the end of the use
            model.prefixes.remember(request.prefix, request.prefix_tokens, now_s, is_asked=False)

    def observe_shadow(self, outcome: Outcome, now_s: float) -> None:
        """Learn from shadow drafting. For the backend's own arm it only calibrates the replay against the engine."""
        memo = _memo(outcome)
        key = memo.key if memo is not None else self._templates.key(outcome.request, counts=False)
        is_overlong = _is_overlong(outcome, memo)
        model = self._predictor.backend_models.get(outcome.decision.backend)
        measured = None if model is None else self._per_step(outcome, model)
        if model is not None and measured is not None:
            measured, weight = model.as_learned(key, _place(outcome, memo, model, now_s), measured, _context(outcome))
            measured = measured if weight else None
        for arm, replayed in outcome.shadow.items():
            if model is not None and arm == model.arm:
                if measured is None:
                    continue
                if outcome.output_tokens >= LEAST_TOKENS:
                    expected = self._shadow_bias.corrected(arm, replayed)
                    self._drafters.observe(
                        model.name, arm, expected, measured, now_s, None, outcome.request, model.drafts
                    )
                    self._predictor.set_silent(model.name, model.name in self._drafters.silent)
                if not self._drafters.is_suspect(model.name):
                    self._shadow_bias.compare(arm, measured, replayed)
            else:
                per_step = self._shadow_bias.corrected(arm, replayed)
                self._add_acceptance(arm, "", key, per_step, 1.0, is_overlong, now_s)

    def _per_step(self, outcome: Outcome, model: BackendModel) -> float | None:
        """Return the tokens per step of an answer, corrected where the engine counts other ones; None if unknown."""
        per_step = outcome.tokens_per_step
        if per_step is not None and self._predictor.corrections:
            per_step *= self._predictor.corrections.get(model.name, 1.0)
        return model.possible(per_step)

    def _observe_drafter(
        self,
        outcome: Outcome,
        memo: Memo | None,
        model: BackendModel,
        key: Key,
        per_step: float,
        place: Place | None,
        now_s: float,
        accuses: bool,
    ) -> None:
        """Learn the tokens per step of an answer, unless they show that the drafter is silent."""
        context_tokens = _context(outcome)
        learned = key, *model.as_learned(key, place, per_step, context_tokens), _is_overlong(outcome, memo), now_s
        expected = None  # where shadow drafting replays the text, that is the better evidence
        if accuses and outcome.output_tokens >= LEAST_TOKENS and not model.has_shadow:
            expected = model.usual_acceptance(key, place, context_tokens)
        for each in self._drafters.observe(
            model.name, model.arm, expected, per_step, now_s, learned, outcome.request, model.drafts
        ):
            self._add_acceptance(model.arm, model.name, *each)
        self._predictor.set_silent(model.name, model.name in self._drafters.silent)

    def _add_acceptance(
        self, arm: str, backend: str, key: Key, per_step: float, weight: float, is_overlong: bool, now_s: float
    ) -> None:
        """Add an observation of tokens per step, except of runaway repetition, which is not typical of the arm."""
        if weight <= 0.0:
            return
        if is_overlong:
            expected = self._predictor.fitted.acceptance.tokens_per_step(arm, backend, key)
            if per_step > _RUNAWAY_PER_STEP * expected:
                return
        log_tokens = math.log(max(1.0, per_step))
        sums = weight, weight * log_tokens, weight * log_tokens**2
        self._statistics.add_at(now_s, ACCEPTANCE, (arm, backend, *key), sums)

    def _step_ratio(
        self,
        outcome: Outcome,
        memo: Memo,
        model: BackendModel,
        per_step: float | None,
        place: Place | None,
        now_s: float,
        teaches: bool,
    ) -> float | None:
        """Return the ratio of the mean step time at the mean load to the prediction; add it if it `teaches`."""
        steps: float | None = outcome.steps
        if per_step is not None:
            steps = outcome.output_tokens / outcome.request.n / per_step
        if steps is None or outcome.tpot_s is None:
            return None
        decode_s = outcome.tpot_s * (outcome.output_tokens - 1)
        if steps <= _MIN_STEPS or decode_s <= 0 or memo.mark is None:
            return None
        requests, context, prompt_tokens = model.backlog.since(memo.mark, now_s)
        prompt_tokens = max(0.0, prompt_tokens - memo.prediction.weighed_tokens)  # its own came before its first token
        load = step_time.terms(requests, context, prompt_tokens / steps)
        expected_s = step_time.seconds(model.cost_at(place), load)
        step_s = decode_s / (steps - 1)
        sums = step_time.observation(step_s, model.load_at_max_k(load, place), model.prior, expected_s)
        if sums is None:
            return None
        if teaches:
            self._statistics.add_at(now_s, STEPS, model.steps_key(place), sums)
        is_evidence = model.observed >= _MIN_OBSERVATIONS and not outcome.is_estimated
        return step_s / expected_s if is_evidence else None

    def _observe_prompt(self, outcome: Outcome, prediction: Prediction, model: BackendModel) -> None:
        """Learn the time of a prompt that hardly had to wait for others."""
        prefill_s, cached = prediction.prefill_s, outcome.cached_tokens
        joined_s = model.joins(prediction.requests) * prediction.step_s
        waited_s = prediction.ttft_s - joined_s - prefill_s
        if outcome.ttft_s is None or model.slowness > 1.0 or waited_s > _MOST_WAIT * prefill_s:
            return
        tokens = prediction.weighed_tokens
        if cached is not None:
            tokens = step_time.weighed(outcome.prompt_tokens - cached, cached, self._predictor.attention)
        seconds = outcome.ttft_s - joined_s - waited_s
        expected_s = tokens * model.prior.per_prompt_token_s
        if step_time.LEAST_RATIO * expected_s <= seconds <= step_time.MOST_RATIO * expected_s:
            model.prompt_time.learn(seconds, tokens)

    def _observe_speed(
        self,
        outcome: Outcome,
        memo: Memo,
        model: BackendModel,
        step_ratio: float | None,
        per_step: float | None,
        place: Place | None,
        now_s: float,
    ) -> None:
        """Compare the outcome with its prediction: eject the backend if it is an outlier, and set its slowness."""
        acceptance_ratio, prediction, request, expected = None, memo.prediction, outcome.request, math.inf
        known = prediction.observations >= _MIN_OBSERVATIONS and not model.silent
        # What the replay of a text says of its drafts is better evidence than what similar requests had.
        is_replayed = model.has_shadow and self._shadow_bias.knows(model.arm)
        if per_step is not None and known and not request.restricted and not is_replayed:
            expected = prediction.tokens_per_step
            if place is not None:
                expected = model.tokens_per_step(memo.key, place, _context(outcome))
            acceptance_ratio = per_step / expected
        slowness = self._outlier_ejection.observe(
            model.name,
            step_ratio,
            acceptance_ratio,
            now_s,
            model.spread,
            request,
            expected,
            UNCOUNTED if model.has_shadow else model.drafts,
        )
        self._predictor.set_slowness(model.name, slowness)


def _memo(outcome: Outcome) -> Memo | None:
    """Return the memo of the decision; None if another policy decided."""
    memo = outcome.decision.memo
    return memo if isinstance(memo, Memo) else None


def _place(outcome: Outcome, memo: Memo | None, model: BackendModel, now_s: float) -> Place | None:
    """Return the place of the mean k that an answer met; None on a backend whose k is fixed.

    Methods that draft in every step tell it; for others it follows from the mean batch.
    """
    depth = model.depth
    if depth is None:
        return None
    tells = not model.has_shadow and not depth.adaptive
    if tells and outcome.drafted_tokens is not None and outcome.tokens_per_step is not None:
        steps = outcome.output_tokens / outcome.tokens_per_step - 1.0  # the step that ends the prefill drafts nothing
        return depth.place_of_k(outcome.drafted_tokens / max(1.0, steps))
    if memo is None or memo.mark is None:
        return depth.place(model.backlog.requests)
    return depth.place(model.backlog.since(memo.mark, now_s)[0])


def _context(outcome: Outcome) -> float:
    """Return the mean context of an answer's steps."""
    return outcome.prompt_tokens + outcome.output_tokens / outcome.request.n / 2


def _is_overlong(outcome: Outcome, memo: Memo | None) -> bool:
    """Return whether an answer is so much longer than predicted that it may be endless repetition."""
    if memo is None:
        return False
    return outcome.output_tokens / outcome.request.n > _RUNAWAY * memo.prediction.output_tokens


_OK: Final = 200
_NEW: Final = 0.05
"""Weight of an answer in the mean of tokens per step."""
_MIN_TOKENS: Final = 8
_MIN_STEPS: Final = 4.0
_MOST_WAIT: Final = 0.2
"""Expected wait for other prompts, relative to the time of a prompt, up to which its time is learned from."""
_ESTIMATE_WEIGHT: Final = 0.25
"""Of an answer whose length is an estimate, among lengths."""
_MIN_OBSERVATIONS: Final = 20.0
"""Below that, a large deviation from the prediction may be the prediction's fault."""
_RUNAWAY: Final = 4.0
_RUNAWAY_PER_STEP: Final = 1.5
