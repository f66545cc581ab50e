"""The `learned` policy: a request goes where it and the others there lose the least time, by a table of means."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from random import Random

from backends.backend import Candidate, EngineChange
from policies.drafter_limits import sparing
from policies.features.request import TEXT_FEATURES, RequestFeatures
from policies.guarded.guardrail import Guardrail
from policies.learned.choose import Chooser
from policies.learned.cost import Delay, Sum, weighed
from policies.learned.detector import Detector
from policies.learned.known import Drafted, Known
from policies.learned.learn import Lessons
from policies.learned.replica import STEPS
from policies.learned.settings import LearnedSettings
from policies.learned.table import ANSWERS, LENGTH, PER_STEP
from policies.load import LoadMeter
from policies.policy import Assessment, Decision, Outcome, Policy, register
from policies.roles import Explainer, Heir, Informed, Learner, Maintained, Price, Work, assess, preview
from policies.statistics import Statistics
from policies.trouble.troubles import TROUBLE, Troubles


@register
class Learned(Policy, Learner, Explainer, Maintained, Heir, Informed):
    """A policy that sends each request where the total delay, its own and that of others, is least."""

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
        """Policy that decides while this one continues to learn; None for none."""
        self._assemble()
        self._fitted = 0, 0

    def _assemble(self) -> None:
        """Build the chooser and the learner; called again whenever a part is replaced."""
        known, guardrail, settings = self.known, self.guardrail, self.settings
        self._chooser = Chooser(self.name, known, self.sum, guardrail, self.troubles, self.meter)
        self._lessons = Lessons(known, guardrail, detects=settings.outlier_ejection)

    @property
    def detector(self) -> Detector[Drafted]:  # type: ignore[override]
        """The findings about replicas."""
        return self.known.detector

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate of the lowest cost, or like `least_loaded` in its blocks of time."""
        if self.pinned is not None:
            spared = self.troubles.sparing(request, sparing(request, candidates))
            return self.follow(self.pinned.choose(request, spared), request, candidates)
        return self._chooser.choose(
            request, candidates, self.clock(), self.rng, is_sent=True, explains=self.explain_candidates
        )

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return the decision that `choose` would make now."""
        if self.pinned is not None:
            spared = self.troubles.sparing(request, sparing(request, candidates), is_sent=False)
            return preview(self.pinned, request, spared)
        rng, explains = copy.copy(self.rng), self.explain_candidates
        return self._chooser.choose(request, candidates, self.clock(), rng, is_sent=False, explains=explains)

    def follow(self, decision: Decision, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return another policy's decision with a memo that lets this one learn from the outcome."""
        return self._chooser.follow(decision, request, candidates, self.clock())

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished request."""
        self._lessons.learn(outcome, self.clock())

    def left(self, decision: Decision) -> None:
        """Remove a request from the work of its backend."""
        self._lessons.end(decision, self.clock())

    def observe_shadow(self, outcome: Outcome) -> None:
        """Learn from shadow drafting on a request that was observed when it finished."""
        self._lessons.learn_shadow(outcome, self.known.shares.of(outcome.request.client), self.clock())

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock, which returns seconds."""
        self.clock = self.statistics.clock = clock

    def take_over(self, previous: Policy) -> None:
        """Take over the statistics of another policy that has some, and everything of another `learned`."""
        statistics = previous.statistics if isinstance(previous, Heir) else None
        if statistics is not None and statistics.tables == self.statistics.tables:
            self.statistics = self.troubles.statistics = statistics
            self.known = Known(self.settings.calibration, self.statistics)
        if isinstance(previous, Learned):
            self.set_clock(previous.clock)
            self.pinned = previous.pinned
            if previous.settings.calibration == self.settings.calibration:  # else expectations differ
                self.known = previous.known
            if previous.settings.guardrail == self.settings.guardrail:
                self.guardrail = previous.guardrail
        self._assemble()

    def forget(self, backend: str) -> None:
        """Drop what is known about a backend that has left; the statistics stay, and age."""
        self.known.forget(backend)

    def engine_changed(self, backend: str, change: EngineChange) -> None:
        """Reset the judgment of a backend, and forget its cache, and its speed if it was slow or is reloaded.

        A slow one would get no request that shows what it is now, since `learned` does not explore.
        """
        if change is EngineChange.SPECULATION:  # effectively another backend under the same name
            self.forget(backend)
            return
        self.known.detector.renew(backend, change.value)
        replica = self.known.replicas.get(backend)
        if replica is not None:
            replica.prefixes.clear()
        if change is EngineChange.RELOAD or (change is EngineChange.RESTART and self.known.is_slow(backend)):
            self.statistics.forget(STEPS, backend)
            if replica is not None:
                replica.prompts.forget()
        if change is EngineChange.RELOAD and replica is not None:
            self.statistics.forget(PER_STEP, replica.own)

    def sent_elsewhere(self, backend: str, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Remember that a backend has a prompt sent by another gateway."""
        if (replica := self.known.replicas.get(backend)) is not None and lengths:
            now_s, cached = self.clock(), replica.prefixes.known_tokens(prefixes, lengths)
            work = weighed(lengths[-1] - cached, cached, self.known.attention)
            replica.hear(replica.prompts.token_s(replica.cost(replica.requests).per_prompt_token_s) * work, now_s)
            replica.prefixes.remember(prefixes, lengths, now_s)

    def evicted(self, backend: str, unused_s: float | None, is_full: bool) -> None:
        """Forget prefixes unused for this many seconds, by the engine's events; None if it sends none."""
        if (replica := self.known.replicas.get(backend)) is not None:
            replica.prefixes.evicted(None if unused_s is None else self.clock() - unused_s, is_full)

    def correct(self, backend: str, factor: float) -> None:
        """Multiply the tokens per step of a backend's answers by a factor; drop what was learned from them before."""
        self.known.correct(backend, factor)

    def maintenance(self) -> Work | None:
        """Return the work that is due; None if nothing is new."""
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
        costs = self._chooser.costs(request, candidates, delays)
        return [
            Assessment(candidate.name, cost, self.known.note(candidate, delay))
            for candidate, delay, cost in zip(candidates, delays, costs, strict=True)
        ]

    def price(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Price:
        """Return the cost of a request on the best candidate: its own time without waiting, and the delay of others."""
        one = min(self._delays(request, candidates), key=lambda each: each.prefill_s + each.decode_s + each.others_s)
        tokens, prompt_s = max(1.0, one.tokens * request.n), (1 + one.requests) * one.prefill_s
        rest_s = max(0.0, one.prefill_s + one.decode_s + one.others_s - prompt_s)
        return Price(prompt_s, rest_s / tokens, tokens, one.prefill_s)

    def _delays(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Delay]:
        return self._chooser.delays(request, candidates, self.clock())[1]
