"""What `learned` makes of an answer that has ended. Apart from the policy itself, so that it can be compiled."""

from __future__ import annotations

import math
from typing import Final

from policies.decision import Outcome
from policies.learned.guardrail import Guardrail
from policies.learned.models import step_time
from policies.learned.models.acceptance import ACCEPTANCE
from policies.learned.models.backend_model import BackendModel
from policies.learned.models.buckets import Key, key_of
from policies.learned.models.length import LENGTH, SHORTEST_SEEN_TOKENS
from policies.learned.models.step_time import STEPS
from policies.learned.outlier_ejection import OutlierEjection
from policies.learned.predict import Prediction, Predictor
from policies.learned.select import Memo
from policies.learned.shadow_drafting import ShadowBias
from policies.statistics import Statistics


class Observer:
    """Adds what requests came to to the experience, and compares it with what was expected of them."""

    def __init__(
        self,
        predictor: Predictor,
        guardrail: Guardrail,
        outlier_ejection: OutlierEjection,
        statistics: Statistics,
        lookup_bias: ShadowBias,
    ) -> None:
        self._predictor = predictor
        self._guardrail = guardrail
        self._quarantine = outlier_ejection
        self._experience = statistics
        self._lookup_bias = lookup_bias

    def observe(self, outcome: Outcome, now_s: float) -> None:
        """Learn from a request that has ended."""
        memo, request = _memo(outcome), outcome.request
        known = self._predictor.known.get(outcome.decision.backend)
        if memo is not None and known is not None:
            backlog = known.backlog
            backlog.look(now_s, backlog.requests)
            backlog.end(memo.prediction.share)
        if outcome.status != _OK or outcome.output_tokens < 1:
            return
        key = memo.key if memo is not None else key_of(request)
        log_tokens = math.log(max(SHORTEST_SEEN_TOKENS, outcome.output_tokens / request.n))
        self._experience.add_at(now_s, LENGTH, key, (1.0, log_tokens, log_tokens**2))
        if outcome.shadow:
            self.observe_shadow(outcome, now_s)
        if known is None:
            return
        per_step = outcome.tokens_per_step if outcome.output_tokens >= _FEWEST_TOKENS else None
        if per_step is not None:
            self._add_acceptance(known.arm, known.name, key, per_step, _is_much_longer(outcome, memo), now_s)
        if memo is None:
            return
        step_ratio = self._step_ratio(outcome, memo, known, per_step, now_s)
        self._observe_speed(outcome, memo.prediction, known, step_ratio, now_s)
        if memo.control is not None:
            work = outcome.output_tokens + _WORK_OF_PROMPT * outcome.prompt_tokens
            self._guardrail.observe(outcome.e2e_s / work, control=memo.control)
        if outcome.cached_tokens is not None:
            expected = request.prompt_tokens - memo.prediction.prompt_tokens
            known.prefixes.learn(expected, outcome.cached_tokens)

    def observe_shadow(self, outcome: Outcome, now_s: float) -> None:
        """Note what lookups would have given, but for the method that was at work: its engine has told itself."""
        memo = _memo(outcome)
        key = memo.key if memo is not None else key_of(outcome.request)
        much_longer = _is_much_longer(outcome, memo)
        known, told = self._predictor.known.get(outcome.decision.backend), outcome.tokens_per_step
        for arm, replayed in outcome.shadow.items():
            if known is not None and arm == known.arm and told is not None:
                self._lookup_bias.compare(arm, told, replayed)
            else:
                per_step = self._lookup_bias.corrected(arm, replayed)
                self._add_acceptance(arm, "", key, per_step, much_longer, now_s)

    def _add_acceptance(
        self, arm: str, backend: str, key: Key, per_step: float, much_longer: bool, now_s: float
    ) -> None:
        """Note tokens per step, but of no answer that repeats itself: lookups excel at that, and at that alone."""
        if much_longer:
            expected = self._predictor.fitted.acceptance.tokens_per_step(arm, backend, key)
            if per_step > _RUNAWAY_PER_STEP * expected:
                return
        log_tokens = math.log(max(1.0, per_step))
        self._experience.add_at(now_s, ACCEPTANCE, (arm, backend, *key), (1.0, log_tokens, log_tokens**2))

    def _step_ratio(
        self, outcome: Outcome, memo: Memo, known: BackendModel, per_step: float | None, now_s: float
    ) -> float | None:
        """Note the mean time of a step under the mean load that it met, and return it over what was expected."""
        if per_step is None or outcome.tpot_s is None:
            return None
        steps = outcome.output_tokens / outcome.request.n / per_step
        decode_s = outcome.tpot_s * (outcome.output_tokens - 1)
        if steps <= _FEWEST_STEPS or decode_s <= 0:
            return None
        requests, context, prompt_tokens = known.backlog.since(memo.mark, now_s)
        load = step_time.terms(requests, context, prompt_tokens / steps)
        expected_s = step_time.seconds(known.cost, load)
        step_s = decode_s / (steps - 1)
        sums = step_time.observation(step_s, load, known.prior, expected_s)
        self._experience.add_at(now_s, STEPS, (known.name,), sums)
        return step_s / expected_s if known.observed >= _FEWEST_OBSERVED else None

    def _observe_speed(
        self, outcome: Outcome, prediction: Prediction, known: BackendModel, step_ratio: float | None, now_s: float
    ) -> None:
        """Take a backend out that is unlike its method, and note by how much it is slower than expected."""
        acceptance_ratio = None
        if outcome.tokens_per_step is not None and prediction.seen >= _FEWEST_OBSERVED:
            acceptance_ratio = outcome.tokens_per_step / prediction.tokens_per_step
        slowness = self._quarantine.observe(known.name, step_ratio, acceptance_ratio, now_s, known.spread)
        self._predictor.note_slowness(known.name, slowness)


def _memo(outcome: Outcome) -> Memo | None:
    """Return what was thought of a request; None where another policy decided and nothing was."""
    memo = outcome.decision.memo
    return memo if isinstance(memo, Memo) else None


def _is_much_longer(outcome: Outcome, memo: Memo | None) -> bool:
    """Return whether an answer is so much longer than expected that it may be repeating itself without end."""
    if memo is None:
        return False
    return outcome.output_tokens / outcome.request.n > _RUNAWAY * memo.prediction.output_tokens


_OK: Final = 200
_FEWEST_TOKENS: Final = 8
_FEWEST_STEPS: Final = 4.0
_FEWEST_OBSERVED: Final = 20.0
"""Before that, a backend that is unlike what is expected of its method may well be right."""
_RUNAWAY: Final = 4.0
_RUNAWAY_PER_STEP: Final = 1.5
_WORK_OF_PROMPT: Final = 0.02
"""Of a token of the prompt, beside one of the answer: computed thousands at a time."""
