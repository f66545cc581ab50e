"""The `learned` policy: a request goes where it and those beside it lose the least time, as a table of means tells."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from backends.backend import Candidate, EngineChange
from policies.drafter_limits import sparing
from policies.features.request import TEXT_FEATURES, RequestFeatures
from policies.guarded.guardrail import Guardrail
from policies.learned.cost import Delay, Sum, weighed
from policies.learned.detector import Detector
from policies.learned.known import Drafted, Known, Memo
from policies.learned.learn import Lessons
from policies.learned.prior import known_to_tokens
from policies.learned.replica import STEPS
from policies.learned.settings import LearnedSettings
from policies.learned.table import ANSWERS, LENGTH, PER_STEP
from policies.load import MIN_WEIGHT, LoadMeter, draw, lowest_propensities
from policies.policy import Assessment, CandidateScores, Decision, Outcome, Policy, register
from policies.roles import Explainer, Heir, Informed, Learner, Maintained, Price, Work, assess, preview
from policies.statistics import Statistics
from policies.trouble.troubles import TROUBLE, Troubles


@register
class Learned(Policy, Learner, Explainer, Maintained, Heir, Informed):
    """A policy that sends each request where the total delay, of the request and of those it slows, is least."""

    name = "learned"
    Settings = LearnedSettings
    settings: LearnedSettings
    text_features = TEXT_FEATURES
    prices_limits = True
    statistics: Statistics
    troubles: Troubles
    guardrail: Guardrail

    def __init__(self, settings: LearnedSettings) -> None:
        super().__init__(settings)
        self.meter = LoadMeter(settings.stale_after_s)
        self.rng = Random(settings.seed)
        self.clock: Callable[[], float] = time.time
        self.statistics = Statistics((PER_STEP, LENGTH, ANSWERS, STEPS, TROUBLE), self.clock)
        self.troubles = Troubles(self.statistics)
        self.guardrail = Guardrail(settings.guardrail)
        self.known = Known(settings.calibration, self.statistics)
        self.sum = Sum(settings.objective, *settings.slo.seconds)
        self.shadow = settings.shadow_drafting
        self.explain_candidates = False
        self.pinned: Policy | None = None
        """Policy that decides instead, while this one continues to learn."""
        self._lessons = Lessons(self.known, self.guardrail, detects=settings.outlier_ejection)
        self._fitted = 0, 0

    @property
    def detector(self) -> Detector[Drafted]:  # type: ignore[override]
        """What was found of replicas."""
        return self.known.detector

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate of the lowest cost, or as `least_loaded` does in its blocks of time."""
        if self.pinned is not None:
            spared = self.troubles.sparing(request, sparing(request, candidates))
            return self.follow(self.pinned.choose(request, spared), request, candidates)
        return self._decide(request, candidates, self.rng, is_sent=True)

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return the decision that `choose` would make now."""
        if self.pinned is not None:
            spared = self.troubles.sparing(request, sparing(request, candidates), is_sent=False)
            return preview(self.pinned, request, spared)
        return self._decide(request, candidates, copy.copy(self.rng), is_sent=False)

    def follow(self, decision: Decision, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return another policy's decision in a form from whose outcome this policy learns."""
        now_s, (groups, lengths) = self.clock(), self.known.kinds.both(request)
        chosen = [one for one in candidates if one.name == decision.backend]
        delays = self.known.delays(request, chosen, groups, lengths, now_s, self.meter.oldest_s())
        memo = Memo(groups, lengths, delays[0], self.known.send(request, delays[0], delays, now_s), is_compared=False)
        reason, propensity, considered = decision.reason, decision.propensity, decision.considered
        return Decision(decision.backend, decision.policy, reason, propensity, considered, memo)

    def _decide(
        self, request: RequestFeatures, candidates: Sequence[Candidate], rng: Random, *, is_sent: bool
    ) -> Decision:
        now_s, known = self.clock(), self.known
        groups, lengths = known.kinds.both(request)
        delays = known.delays(request, candidates, groups, lengths, now_s, self.meter.oldest_s())
        costs = self.sum.of(request, delays, is_sent=is_sent)
        if self.troubles.found:
            self.troubles.price(request, candidates, costs, is_sent=is_sent)
        chosen, reason, propensity, odds = costs.index(min(costs)), "least_delay", 1.0, None
        if self.guardrail.by_control(now_s):
            odds = _least_loaded(request, candidates, delays)
            chosen, reason = draw(odds, rng), "frozen" if self.guardrail.frozen else "control"
            propensity = odds[chosen]
        delay, name, considered, work = delays[chosen], candidates[chosen].name, None, None
        if self.explain_candidates:
            odds = odds or [float(index == chosen) for index in range(len(candidates))]
            considered = CandidateScores(candidates, [one.own_s for one in delays], odds, costs)
        if is_sent:
            work = known.send(request, delay, delays, now_s)
        memo = Memo(groups, lengths, delay, work, is_compared=len(candidates) > 1)
        cached = int(delay.cached_tokens)
        return Decision(name, self.name, reason, propensity, considered, memo, cached, delay.replica.prefixes.goes_by)

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished request."""
        self._lessons.learn(outcome, self.clock())

    def observe_shadow(self, outcome: Outcome) -> None:
        """Learn from shadow drafting on a request that was observed when it finished."""
        self._lessons.learn_shadow(outcome, 1.0, self.clock())

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock, which returns seconds."""
        self.clock = self.statistics.clock = clock

    def take_over(self, previous: Policy) -> None:
        """Continue with the statistics of another policy that has some, and with all the rest of another `learned`."""
        statistics = previous.statistics if isinstance(previous, Heir) else None
        if statistics is not None and statistics.tables == self.statistics.tables:
            self.statistics = self.troubles.statistics = statistics
            self.known = Known(self.settings.calibration, self.statistics)
        if isinstance(previous, Learned):
            self.set_clock(previous.clock)
            self.pinned = previous.pinned
            if previous.settings.calibration == self.settings.calibration:  # else other things are expected
                self.known = previous.known
            if previous.settings.guardrail == self.settings.guardrail:
                self.guardrail = previous.guardrail
        self._lessons = Lessons(self.known, self.guardrail, detects=self.settings.outlier_ejection)

    def forget(self, backend: str) -> None:
        """Drop what is kept of a backend that has left; the statistics stay, and age."""
        self.known.forget(backend)

    def engine_changed(self, backend: str, change: EngineChange) -> None:
        """Judge a backend anew, and forget what its engine had cached, and the speed of another one."""
        if change is EngineChange.SPECULATION:  # to us it is another backend under the same name
            self.forget(backend)
            return
        self.known.detector.renew(backend, change.value)
        replica = self.known.replicas.get(backend)
        if replica is not None:
            replica.prefixes.clear()
        if change is EngineChange.RELOAD:
            self.statistics.drop(STEPS, lambda key: key[0] == backend)
            if replica is not None:
                self.statistics.drop(PER_STEP, lambda key: key[0] == replica.own)

    def sent_elsewhere(self, backend: str, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Remember that a backend has a prompt which another gateway has sent."""
        if (replica := self.known.replicas.get(backend)) is not None and lengths:
            now_s, cached = self.clock(), replica.prefixes.known_tokens(prefixes, lengths)
            work = weighed(lengths[-1] - cached, cached, self.known.attention)
            replica.hear(replica.cost(replica.requests).per_prompt_token_s * work, now_s)
            replica.prefixes.remember(prefixes, lengths, now_s)

    def evicted(self, backend: str, unused_s: float | None, is_full: bool) -> None:
        """Forget what was not used for so many seconds, as an engine tells of its cache; None if it tells nothing."""
        if (replica := self.known.replicas.get(backend)) is not None:
            replica.prefixes.evicted(None if unused_s is None else self.clock() - unused_s, is_full)

    def correct(self, backend: str, factor: float) -> None:
        """Multiply the tokens per step of a backend's answers; what was learned from them before is dropped."""
        self.known.correct(backend, factor)

    def maintenance(self) -> Work | None:
        """Return the work that is due; None without anything new."""
        version = self.statistics.observations, len(self.known.replicas)
        if version == self._fitted:
            return None
        self._fitted = version
        return self.known.fit(self.clock())

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate by its cost in seconds, with the terms of the sum."""
        if self.pinned is not None:
            return assess(self.pinned, request, candidates)
        delays = self._delays(request, candidates)
        costs = self.sum.of(request, delays, is_sent=False)
        self.troubles.price(request, candidates, costs, is_sent=False)
        return [
            Assessment(candidate.name, cost, self._note(candidate, delay))
            for candidate, delay, cost in zip(candidates, delays, costs, strict=True)
        ]

    def price(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Price:
        """Return what a request costs where that is least: its own time without waiting, and the delay of others."""
        one = min(self._delays(request, candidates), key=lambda each: each.prefill_s + each.decode_s + each.others_s)
        tokens, prompt_s = max(1.0, one.tokens * request.n), (1 + one.requests) * one.prefill_s
        rest_s = max(0.0, one.prefill_s + one.decode_s + one.others_s - prompt_s)
        return Price(prompt_s, rest_s / tokens, tokens, one.prefill_s)

    def _delays(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Delay]:
        groups, lengths = self.known.kinds.both(request)
        return self.known.delays(request, candidates, groups, lengths, self.clock(), self.meter.oldest_s())

    def _note(self, candidate: Candidate, delay: Delay) -> str:
        note = (
            f"first token {delay.ttft_s:.3f} s, the rest {delay.decode_s:.3f} s "
            f"({delay.tokens:.0f} tokens, {delay.per_step:.2f} per step of "
            f"{1e3 * delay.step_s:.1f} ms), others delayed by {delay.others_s:.3f} s"
        )
        if cached := int(delay.cached_tokens):
            note += f"; {cached:,} tokens of the prompt cached, by {delay.replica.prefixes.goes_by}"
        known = known_to_tokens(self.settings.calibration, candidate.method)
        if delay.context_tokens > known:
            note += f"; its acceptance is published for up to {known:,.0f} tokens of context"
        return "; ".join([note, *map(str, self.known.detector.found.get(candidate.name, ()))])


def _least_loaded(request: RequestFeatures, candidates: Sequence[Candidate], delays: Sequence[Delay]) -> list[float]:
    """Return the propensities of `least_loaded`, among those without thousands of tokens more to compute than others.

    A conversation of 100,000 tokens that is sent where it is not cached slows the whole pool, for no comparison.
    """
    spared = sparing(request, candidates)
    new = [request.prompt_tokens - one.cached_tokens for one in delays]
    most = min(tokens for one, tokens in zip(candidates, new, strict=True) if one in spared) + _LONG_PROMPT
    return lowest_propensities(
        [
            (delay.requests + 1) / (one.weight or MIN_WEIGHT) if one in spared and tokens < most else math.inf
            for one, delay, tokens in zip(candidates, delays, new, strict=True)
        ]
    )


_LONG_PROMPT: Final = 2048
