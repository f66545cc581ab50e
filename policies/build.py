"""Wraps any policy in a guardrail and the detector; `learned` has both inside, where they share its expectations."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

from backends.backend import Candidate, EngineChange
from policies.decision import Assessment, Decision, Outcome
from policies.experiment.blocks import kind_of, work_of
from policies.features.request import TEXT_FEATURES, RequestFeatures
from policies.guarded.guardrail import Guardrail
from policies.learned.cost import Delay
from policies.learned.detector import Detector
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.learned.shadow_drafting import ShadowSettings
from policies.load import STALE_AFTER_S, LoadMeter
from policies.policy import Choose, GuardrailSettings, Policy, PolicySettings, policies
from policies.roles import Explainer, Heir, Informed, Learner, Maintained, Work, assess, check_roles, preview
from policies.statistics import Statistics


def build(name: str, settings: PolicySettings) -> Policy:
    """Return a registered policy, with the guardrail and the detector if its settings enable them.

    Raises
    ------
    TypeError
        If the policy has a method of a role that it does not inherit.
    """
    policy = policies()[name](settings)
    check_roles(policy)
    if isinstance(policy, Learned) or not (settings.guardrail.share or settings.outlier_ejection):
        return policy
    return Guarded(policy)


def learned_of(policy: Policy) -> Learned | None:
    """Return the `learned` behind a policy's expectations: itself, or the one that watches it; None without one."""
    if isinstance(policy, Guarded):
        return policy.watching
    return policy if isinstance(policy, Learned) else None


def predicted_s(decision: Decision) -> float | None:
    """Return the predicted seconds to finish of a sent request; None if the policy predicts nothing."""
    memo = decision.memo.watching if isinstance(decision.memo, _Memo) else decision.memo
    return memo.own_s if isinstance(memo, Delay) else None


class _Memo(NamedTuple):
    """The memos of the policy and of the `learned` that watches it."""

    own: Any
    watching: Any
    is_compared: bool  # whether there was a choice


class Guarded(Policy, Learner, Explainer, Maintained, Heir, Informed):
    """A policy with a guardrail and the detector around it.

    The detector compares backends with the expectations of a `learned` that watches but decides nothing. The policy is
    not asked for the scores of all candidates, since `least_loaded` may decide.
    """

    guardrail: Guardrail
    detector: Detector[Any]

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.settings)
        self.policy = policy
        self.name, self.prices_limits = policy.name, policy.prices_limits
        self.text_features, self.reads_requests = policy.text_features, policy.reads_requests
        self.clock: Callable[[], float] = time.time
        self.guardrail = Guardrail(policy.settings.guardrail)
        self.detector = Detector()
        seed = getattr(policy.settings, "seed", None)
        self._rng = Random(seed if seed is None else f"guarded {seed}")  # independent of the policy's random numbers
        self._meter = LoadMeter(getattr(policy.settings, "stale_after_s", STALE_AFTER_S))
        self.watching: Learned | None = None
        if policy.settings.outlier_ejection:
            off = LearnedSettings(guardrail=GuardrailSettings(share=0), shadow_drafting=ShadowSettings(sample=0))
            self.watching = Learned(off)
            self.detector = self.watching.detector
            self.text_features, self.reads_requests = TEXT_FEATURES, True
        if isinstance(policy, Learner):
            self.shadow, self.troubles = policy.shadow, policy.troubles
        self._parts: tuple[Policy, ...] = (policy,) if self.watching is None else (policy, self.watching)
        self._informed = [part for part in self._parts if isinstance(part, Informed)]

    @property
    def statistics(self) -> Statistics | None:  # type: ignore[override]
        """Those of the policy, else those of `watching`."""
        kept = [each.statistics for each in self._parts if isinstance(each, Heir) and each.statistics is not None]
        return kept[0] if kept else None

    def take_over(self, previous: Policy) -> None:
        """Take over the comparison, the expectations, and what the inner policy has learned."""
        inner = previous.policy if isinstance(previous, Guarded) else previous
        if isinstance(self.policy, Heir):
            self.policy.take_over(inner)
        if isinstance(previous, Guarded) and previous.settings.guardrail == self.settings.guardrail:
            self.guardrail = previous.guardrail
        if self.watching is not None:
            watched = previous.watching if isinstance(previous, Guarded) else previous
            self.watching.take_over(previous if watched is None else watched)
            self.detector = self.watching.detector

    def forget(self, backend: str) -> None:
        """Drop what the parts know about a backend that has left."""
        for part in self._informed:
            part.forget(backend)

    def engine_changed(self, backend: str, change: EngineChange) -> None:
        """Reset the judgment of a backend."""
        for part in self._informed:
            part.engine_changed(backend, change)

    def correct(self, backend: str, factor: float) -> None:
        """Multiply the tokens per step that a backend's answers show by `factor`, to match its engine's counters."""
        for part in self._informed:
            part.correct(backend, factor)

    def sent_elsewhere(self, backend: str, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Remember that a backend has a prompt sent by another gateway."""
        for part in self._informed:
            part.sent_elsewhere(backend, prefixes, lengths)

    def evicted(self, backend: str, unused_s: float | None, is_full: bool) -> None:
        """Forget prefixes unused for this many seconds."""
        for part in self._informed:
            part.evicted(backend, unused_s, is_full)

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose a candidate that is not resting: by the policy, or by `least_loaded` for the guardrail."""
        watching, now_s = self.watching, self.clock()
        eligible = self.detector.admitted(candidates, now_s)
        decision = self._decide(request, eligible, self.policy.choose, self._rng, now_s)
        watched = None if watching is None else watching.follow(decision, request, eligible).memo
        return replace(decision, memo=_Memo(decision.memo, watched, len(candidates) > 1))

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return the decision that `choose` would make now."""
        now_s = self.clock()
        eligible = self.detector.admitted(candidates, now_s)
        return self._decide(request, eligible, partial(preview, self.policy), copy.copy(self._rng), now_s)

    def _decide(
        self, request: RequestFeatures, eligible: Sequence[Candidate], choose: Choose, rng: Random, now_s: float
    ) -> Decision:
        guardrail = self.guardrail
        if not guardrail.by_control(now_s):
            return choose(request, eligible)
        chosen, propensity = self._meter.least(eligible, rng)
        return Decision(chosen.name, self.name, "frozen" if guardrail.frozen else "control", propensity)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Rate each candidate as the policy does, noting what was found about it."""
        return [
            replace(each, note="; ".join([each.note, *map(str, self.detector.found.get(each.backend, ()))]))
            for each in assess(self.policy, request, candidates)
        ]

    def observe(self, outcome: Outcome) -> None:
        """Pass the outcome to the guardrail, to the policy, and to `watching` with its expectations."""
        memo = outcome.decision.memo
        own, watched, is_compared = memo if isinstance(memo, _Memo) else (memo, None, False)
        if is_compared and not outcome.was_paused and outcome.status == 200 and outcome.output_tokens >= 1:
            self.guardrail.observe(self.clock(), outcome.e2e_s, work_of(outcome), kind_of(outcome.request))
        if isinstance(self.policy, Learner):
            self.policy.observe(_with(outcome, own))
        if self.watching is not None:
            self.watching.observe(_with(outcome, watched))

    def left(self, decision: Decision) -> None:
        """Report to the parts that a request has left its backend."""
        memo = decision.memo
        own, watched = (memo.own, memo.watching) if isinstance(memo, _Memo) else (memo, None)
        if isinstance(self.policy, Learner):
            self.policy.left(replace(decision, memo=own))
        if self.watching is not None:
            self.watching.left(replace(decision, memo=watched))

    def observe_shadow(self, outcome: Outcome) -> None:
        """Forward the outcome of shadow drafting to the policy."""
        if isinstance(self.policy, Learner):
            memo = outcome.decision.memo
            self.policy.observe_shadow(_with(outcome, memo.own if isinstance(memo, _Memo) else memo))

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock of all parts."""
        self.clock = clock
        for part in self._parts:
            if isinstance(part, Maintained):
                part.set_clock(clock)

    def maintenance(self) -> Work | None:
        """Return the work that is due in any part."""
        due = [part.maintenance() for part in self._parts if isinstance(part, Maintained)]
        works = [work for work in due if work is not None]
        return (lambda *pause: [work(*pause) for work in works]) if works else None


def _with(outcome: Outcome, memo: Any) -> Outcome:
    return replace(outcome, decision=replace(outcome.decision, memo=memo))
