"""The `lean` policy: a request goes where it and those beside it lose the least time, as a table of means tells."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, NamedTuple

from pydantic import Field, field_validator

from backends.backend import Candidate, EngineChange
from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from backends.validation import CheckedModel
from policies.decision import CandidateScores
from policies.drafter_limits import sparing
from policies.features.request import TEXT_FEATURES, TYPICAL_TOKENS, RequestFeatures
from policies.guarded.guardrail import Guardrail, kind_of, work_of
from policies.lean.cost import Ask, Delay, Objective, Sum, coming, crowd_of, weighed
from policies.lean.detector import NOTHING, Detector
from policies.lean.replica import STEPS, Replica, Work, fit_factors
from policies.lean.table import LENGTH, PER_STEP, Groups, Kinds, Means, Shares
from policies.learned.models.prefix_memory import ESTIMATE, PrefixMemory
from policies.learned.models.prior import DEFAULT_CALIBRATION, attention_share, expected_by_k, known_to_tokens
from policies.learned.shadow_drafting import ShadowBias, ShadowSettings
from policies.load import MIN_WEIGHT, LoadMeter, draw, lowest_propensities
from policies.load_policy import LoadSettings
from policies.policy import Assessment, Decision, GuardrailSettings, Outcome, Policy, PolicySettings, register
from policies.roles import Price, Stateful, assess, preview
from policies.roles import Work as Job
from policies.statistics import Statistics
from policies.trouble.troubles import TROUBLE, Troubles


class Slo(CheckedModel):
    """The SLO of requests for which neither the client nor its key sets one."""

    ttft_ms: float | None = Field(default=None, gt=0, description="Milliseconds to the first token.")
    tpot_ms: float | None = Field(default=None, gt=0, description="Milliseconds per output token after the first.")

    @property
    def seconds(self) -> tuple[float | None, float | None]:
        """Seconds to the first token, and per output token."""
        return _seconds(self.ttft_ms), _seconds(self.tpot_ms)


class LeanSettings(LoadSettings):
    """The objective, and what is taken to be so until answers tell."""

    objective: Objective = Field(
        default=Objective.LATENCY,
        description="What is optimised: `latency` (the total delay of all requests), `ttft`, `tpot`, or `goodput` "
        "(the share of requests that meet their SLO).",
    )
    slo: Slo = Field(default=Slo(), description="Default SLO for `goodput`.")
    calibration: str = Field(
        default=DEFAULT_CALIBRATION,
        description="Calibration that predicts backends without observations: a name, or the path of a YAML file, as "
        "for `simulate`. The overall speed of your machines is learned quickly, so choose one in which the methods "
        "compare as on your machines.",
    )
    guardrail: GuardrailSettings = Field(default=GuardrailSettings(), description="Comparison with `least_loaded`.")
    outlier_ejection: bool = Field(
        default=True, description=PolicySettings.model_fields["outlier_ejection"].description
    )
    shadow_drafting: ShadowSettings = Field(
        default=ShadowSettings(),
        description="Replay of n-gram and suffix drafting on finished texts, which measures their acceptance on texts "
        "that other backends wrote.",
    )

    @field_validator("calibration")
    @classmethod
    def _known(cls, name: str) -> str:
        return load_calibration(name).name


class Memo(NamedTuple):
    """What was expected of a request when it was sent."""

    groups: Groups
    delay: Delay
    work: Work | None  # None if it was not sent
    is_compared: bool  # whether it is part of the comparison with `least_loaded`


class Learned(NamedTuple):
    """What an answer teaches of tokens per step."""

    groups: Groups
    excess: float
    weight: float
    share: float


@register
class Lean(Policy):
    """A policy that sends each request where the total delay, of the request and of those it slows, is least."""

    name = "lean"
    Settings = LeanSettings
    settings: LeanSettings
    text_features = TEXT_FEATURES
    prices_limits = True

    def __init__(self, settings: LeanSettings) -> None:
        super().__init__(settings)
        self.meter = LoadMeter(settings.stale_after_s)
        self.rng = Random(settings.seed)
        self.clock: Callable[[], float] = time.time
        self.calibration, self.attention = settings.calibration, attention_share(settings.calibration)
        self.statistics = Statistics((PER_STEP, LENGTH, STEPS, TROUBLE), self.clock)
        self.per_step = Means(PER_STEP, self.statistics, _MOST_EXCESS)
        self.lengths = Means(LENGTH, self.statistics, _MOST_LENGTH)
        self.kinds, self.shares = Kinds(), Shares()
        self.replicas: dict[str, Replica] = {}
        self.prefixes = PrefixMemory()
        self.troubles = Troubles(self.statistics)
        self.guardrail = Guardrail(settings.guardrail)
        self.detector: Detector[Learned] = Detector()
        self.shadow, self._shadow_bias = settings.shadow_drafting, ShadowBias()
        self.corrections: dict[str, float] = {}  # factors on what answers of a replica show, by its name
        self.sum = Sum(settings.objective, *settings.slo.seconds)
        self.explain_candidates = False
        self.pinned: Policy | None = None
        """Policy that decides instead, while this one continues to learn."""
        self._fitted = 0, 0
        self._mean_prefill_s = 0.0
        self._usual = (1.0, 1.0, 1.0, 1.0)

    # Choosing

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate of the lowest cost, or as `least_loaded` would in its blocks of time."""
        if self.pinned is not None:
            spared = self.troubles.sparing(request, sparing(request, candidates))
            return self.follow(self.pinned.choose(request, spared), request, candidates)
        return self._decide(request, candidates, is_sent=True)

    def follow(self, decision: Decision, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return another policy's decision in a form from whose outcome this policy learns."""
        chosen = [one for one in candidates if one.name == decision.backend]
        now_s, groups = self.clock(), self.kinds.of(request)
        (delay,) = self.delays(request, chosen, groups, now_s)
        memo = Memo(groups, delay, self._send(request, delay, [delay], now_s), False)
        return Decision(
            decision.backend, decision.policy, decision.reason, decision.propensity, decision.considered, memo
        )

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return the decision that `choose` would make now."""
        if self.pinned is not None:
            spared = self.troubles.sparing(request, sparing(request, candidates), is_sent=False)
            return preview(self.pinned, request, spared)
        return self._decide(request, candidates, is_sent=False)

    def _decide(self, request: RequestFeatures, candidates: Sequence[Candidate], *, is_sent: bool) -> Decision:
        now_s, groups = self.clock(), self.kinds.of(request)
        delays = self.delays(request, candidates, groups, now_s)
        costs = self.sum.of(request, delays, is_sent=is_sent)
        if self.troubles.found:
            self.troubles.price(request, candidates, costs, is_sent=is_sent)
        if self.guardrail.by_control(now_s):
            propensities = self._least_loaded(request, candidates, delays)
            rng = self.rng if is_sent else _copy(self.rng)
            chosen, reason = draw(propensities, rng), "frozen" if self.guardrail.frozen else "control"
            propensity = propensities[chosen]
        else:
            chosen, reason, propensity = costs.index(min(costs)), "least_delay", 1.0
            propensities = []
        delay, candidate = delays[chosen], candidates[chosen]
        considered = None
        if self.explain_candidates:
            odds = propensities or [float(index == chosen) for index in range(len(candidates))]
            considered = CandidateScores(candidates, [one.own_s for one in delays], odds, costs)
        work = self._send(request, delay, delays, now_s) if is_sent else None
        return Decision(
            candidate.name,
            self.name,
            reason,
            propensity,
            considered,
            Memo(groups, delay, work, len(candidates) > 1),
            int(delay.cached_tokens),
            delay.replica.prefixes.goes_by,
        )

    def delays(
        self, request: RequestFeatures, candidates: Sequence[Candidate], groups: Groups, now_s: float
    ) -> list[Delay]:
        """Return what a request takes on each candidate, without side effects."""
        prompt_tokens = request.prompt_tokens
        tokens = self.tokens(request, groups)
        context = prompt_tokens + tokens / 2
        stretch, coming_per_s = coming(request.qps / len(candidates), self._mean_prefill_s)
        ask = Ask(
            tokens,
            context,
            self.prefixes.holders(request),
            self.attention,
            stretch,
            coming_per_s,
            crowd_of(candidates),
        )
        calibration, workload, temperature = self.calibration, request.workload, request.temperature
        oldest_s, found, means = self.meter.oldest_s(), self.detector.found, self.per_step
        delays = []
        for candidate in candidates:
            replica = self.replicas.get(candidate.name) or self._new(candidate)
            if (load := candidate.load) is not replica.load:  # a new report is a new object
                replica.read(candidate)
            requests = candidate.in_flight
            if load.at_s >= oldest_s:
                requests += replica.others
            if replica.k:
                by_k = expected_by_k(calibration, replica.method, replica.k, workload, temperature, context)
                excess = means.mean(replica.arm, groups)
            else:
                by_k, excess = _PLAIN, 0.0
            effect = self.detector.effect(replica.name, now_s) if replica.name in found else NOTHING
            delays.append(Delay(replica, request, ask, by_k, excess, effect, requests, now_s))
        return delays

    def tokens(self, request: RequestFeatures, groups: Groups) -> float:
        """Return the expected tokens of each sequence of the answer."""
        mean = self.lengths.mean("", self.kinds.of_length(request, groups))
        tokens = TYPICAL_TOKENS * math.exp(mean + _SKEW)
        limit = request.max_tokens
        return max(1.0, tokens if limit is None or tokens < limit else float(limit))

    def _send(self, request: RequestFeatures, delay: Delay, delays: Sequence[Delay], now_s: float) -> Work:
        """Add a request to the work of a replica."""
        replica = delay.replica
        self.kinds.see(request.template)
        for one in delays:
            one.replica.update(now_s, one.requests)
        work = delay.work(now_s)
        replica.send(work, now_s)
        self._mean_prefill_s += _NEW * (delay.prefill_s - self._mean_prefill_s)
        replica.prefixes.remember(request.prefix, request.prefix_tokens, now_s)
        return work

    def _least_loaded(
        self, request: RequestFeatures, candidates: Sequence[Candidate], delays: Sequence[Delay]
    ) -> list[float]:
        """Return the propensities of `least_loaded`, among those without thousands of tokens more to compute."""
        spared = sparing(request, candidates)
        new = [request.prompt_tokens - one.cached_tokens for one in delays]
        most = min(tokens for one, tokens in zip(candidates, new, strict=True) if one in spared) + _LONG_PROMPT
        return lowest_propensities(
            [
                (delay.requests + 1) / (one.weight or MIN_WEIGHT) if one in spared and tokens < most else math.inf
                for one, delay, tokens in zip(candidates, delays, new, strict=True)
            ]
        )

    def _new(self, candidate: Candidate) -> Replica:
        replica = Replica(candidate, self.calibration, self.prefixes.add_backend())
        replica.learn(self._usual, 0.0)
        self.replicas[candidate.name] = replica
        return replica

    # Learning

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished request."""
        request, now_s, memo = outcome.request, self.clock(), outcome.decision.memo
        memo = memo if isinstance(memo, Memo) else None
        replica = self.replicas.get(outcome.decision.backend)
        is_beyond = replica is not None and replica.reach.is_beyond(outcome)
        if memo is not None and memo.work is not None and replica is not None:
            replica.end(memo.work, now_s, is_beyond=is_beyond and replica.reach.harms_others)
        if outcome.status != _OK or outcome.output_tokens < 1:
            return
        groups = memo.groups if memo is not None else self.kinds.of(request)
        share = self.shares.weight(request.client)
        self._learn_length(outcome, groups, share, now_s)
        if outcome.shadow:
            self._learn_shadow(outcome, groups, share, now_s)
        if replica is None:
            return
        source = self.detector.see(request)
        is_drafted = not is_beyond and replica.was_drafted(now_s - outcome.e2e_s)
        reach = replica.reach
        teaches = is_drafted or not reach.is_known  # what has no known cause is learned, but accuses nobody
        accuses = is_drafted and not (replica.others and reach.is_known and reach.harms_others)
        per_step = self._per_step(outcome, replica)
        if is_drafted and per_step is not None and reach.is_known:
            reach.per_step += (_NEW if reach.per_step else 1.0) * (per_step - reach.per_step)
        steps: float | None = outcome.steps
        if per_step is not None:
            steps = outcome.output_tokens / request.n / per_step
        met = None
        if steps is not None and memo is not None and memo.work is not None:
            met = replica.met(memo.work, now_s, max(1.0, steps))
        batch = met[0] if met is not None else replica.requests
        if teaches and per_step is not None and replica.k and outcome.output_tokens >= _MIN_TOKENS:
            self._learn_drafts(outcome, replica, groups, per_step, batch, source if accuses else _NOBODY, share, now_s)
        if memo is None:
            return
        if steps is not None and met is not None and outcome.tpot_s is not None and steps > _MIN_STEPS:
            step_s = outcome.tpot_s * (outcome.output_tokens - 1) / (steps - 1)
            place = replica.place(batch, _mean_k(outcome, steps))
            if step_s > 0.0:
                self._learn_steps(outcome, replica, step_s, met, place, source, now_s, teaches=teaches)
        if memo.is_compared and not outcome.was_paused:
            self.guardrail.observe(now_s, outcome.e2e_s, work_of(outcome), kind_of(request))
        self._learn_prompt(outcome, memo.delay, replica, now_s)

    def observe_shadow(self, outcome: Outcome) -> None:
        """Learn from shadow drafting on a request that was observed when it finished."""
        memo, request = outcome.decision.memo, outcome.request
        groups = memo.groups if isinstance(memo, Memo) else self.kinds.of(request)
        self._learn_shadow(outcome, groups, 1.0, self.clock())

    def _learn_length(self, outcome: Outcome, groups: Groups, share: float, now_s: float) -> None:
        """Learn the tokens of an answer; one that is far from the expected counts as eight times that."""
        tokens = max(_SHORTEST, outcome.output_tokens / outcome.request.n)
        if outcome.request.max_tokens is not None:
            tokens = min(tokens, float(max(1, outcome.request.max_tokens)))
        groups = self.kinds.of_length(outcome.request, groups)
        expected = self.lengths.mean("", groups)
        log = min(max(math.log(tokens / TYPICAL_TOKENS), expected - _FAR), expected + _FAR)
        weight = _ESTIMATE if outcome.is_estimated else 1.0
        self.lengths.add("", groups, log, weight * share, weight, now_s)

    def _per_step(self, outcome: Outcome, replica: Replica) -> float | None:
        """Return the tokens per step of an answer within what its replica can give; None if unknown or far beyond."""
        per_step = outcome.tokens_per_step
        if per_step is None:
            return None
        per_step *= self.corrections.get(replica.name, 1.0)
        return min(max(1.0, per_step), replica.k + 1.0) if per_step <= _FAR_BEYOND * (replica.k + 1.0) else None

    def _by_k(self, replica: Replica, outcome: Outcome) -> tuple[float, ...]:
        request = outcome.request
        context = outcome.prompt_tokens + outcome.output_tokens / request.n / 2
        return expected_by_k(
            self.calibration, replica.method, replica.k, request.workload, request.temperature, context
        )

    def _learn_drafts(
        self,
        outcome: Outcome,
        replica: Replica,
        groups: Groups,
        per_step: float,
        batch: float,
        source: str | None,
        share: float,
        now_s: float,
    ) -> None:
        """Learn the tokens per step of an answer, unless they show that its drafter does otherwise than it did."""
        by_k, request = self._by_k(replica, outcome), outcome.request
        place = replica.place(batch, _mean_k(outcome, outcome.output_tokens / per_step))
        excess, weight = replica.excess(by_k, per_step, place)
        learned = Learned(groups, excess, weight, share) if weight else None
        expected = None
        shadow = outcome.shadow.get(replica.arm)
        is_known = self.per_step.count(replica.arm, groups[2]) >= _KNOWN or shadow is not None
        if source is not _NOBODY and is_known and not request.restricted and outcome.output_tokens >= _EVIDENT:
            if shadow is not None and self._shadow_bias.knows(replica.arm):
                expected = self._shadow_bias.corrected(replica.arm, shadow)
            elif place is None:
                expected = replica.per_step(by_k, self.per_step.mean(replica.arm, groups), batch)
            else:
                expected = per_step * math.exp(self.per_step.mean(replica.arm, groups) - excess)
        counters = replica.drafts if not replica.has_shadow else (0, 0)
        for one in self.detector.observe_drafts(
            replica.name, replica.arm, expected, per_step, source, counters, learned, now_s
        ):
            own = one.weight
            self.per_step.add(replica.arm, one.groups, one.excess, own * one.share, own, now_s)

    def _learn_shadow(self, outcome: Outcome, groups: Groups, share: float, now_s: float) -> None:
        """Learn what other replicas would have had on a text; for its own it only corrects the replay."""
        replica, request = self.replicas.get(outcome.decision.backend), outcome.request
        for arm, replayed in outcome.shadow.items():
            if replica is not None and arm == replica.arm:
                measured = self._per_step(outcome, replica)
                if measured is not None and replica.name not in self.detector.found and replica.depth is None:
                    self._shadow_bias.compare(arm, measured, replayed)
                continue
            by_k = _expected(self.calibration, arm, request)
            excess = math.log(max(1.0, self._shadow_bias.corrected(arm, replayed))) - by_k
            self.per_step.add(arm, groups, excess, share, 1.0, now_s)

    def _learn_steps(
        self,
        outcome: Outcome,
        replica: Replica,
        step_s: float,
        met: tuple[float, float, float],
        place: tuple[int, float] | None,
        source: str | None,
        now_s: float,
        *,
        teaches: bool,
    ) -> None:
        """Learn the time of steps under the load that an answer met."""
        sums = replica.observation(step_s, met, place)
        if sums is None:
            return
        if teaches:
            self.statistics.add_at(now_s, STEPS, (replica.name,), sums)
        if replica.observed >= _KNOWN and not outcome.is_estimated and self.settings.outlier_ejection:
            expected_s = replica.expected_s(met, place)
            self.detector.observe_speed(replica.name, step_s / expected_s, source, now_s)

    def _learn_prompt(self, outcome: Outcome, delay: Delay, replica: Replica, now_s: float) -> None:
        """Learn the time of a prompt that hardly waited, and what its engine had cached."""
        cached, request = outcome.cached_tokens, outcome.request
        joined_s = (replica.joins if delay.requests else 1.5) * delay.step_s
        waited_s = delay.ttft_s - joined_s - delay.prefill_s
        if outcome.ttft_s is not None and waited_s <= _MOST_WAIT * delay.prefill_s:
            work = delay.prompt_work
            if cached is not None:
                work = weighed(outcome.prompt_tokens - cached, cached, self.attention)
            replica.learn_prompt(outcome.ttft_s - joined_s - waited_s, work)
        if cached is not None:
            replica.prefixes.learn(delay.cached_tokens, cached)
        if replica.prefixes.goes_by is not ESTIMATE:  # what it evicts depends on the end of the use
            replica.prefixes.remember(request.prefix, request.prefix_tokens, now_s, is_asked=False)

    # What happens to replicas and engines

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock, which returns seconds."""
        self.clock = self.statistics.clock = clock

    def take_over(self, previous: Policy) -> None:
        """Continue with the statistics of another policy that has some, and with all the rest of another `lean`."""
        if isinstance(previous, Stateful) and previous.statistics.tables == self.statistics.tables:
            self.statistics = self.troubles.statistics = previous.statistics
            self.per_step.statistics = self.lengths.statistics = previous.statistics
        if isinstance(previous, Lean):
            self.set_clock(previous.clock)
            self.kinds, self.shares, self.pinned = previous.kinds, previous.shares, previous.pinned
            self._shadow_bias, self.corrections = previous._shadow_bias, previous.corrections
            if previous.calibration == self.calibration:  # else other things are expected of each replica
                self.per_step.arms, self.lengths.arms = previous.per_step.arms, previous.lengths.arms
                self.prefixes, self.replicas, self.detector = previous.prefixes, previous.replicas, previous.detector
            if previous.settings.guardrail == self.settings.guardrail:
                self.guardrail = previous.guardrail

    def forget(self, backend: str) -> None:
        """Drop what is kept of a backend that has left; the statistics stay, and age."""
        self.corrections.pop(backend, None)
        self.detector.forget(backend)
        if (replica := self.replicas.pop(backend, None)) is not None:
            self.prefixes.remove_backend(replica.prefixes)

    def engine_changed(self, backend: str, change: EngineChange) -> None:
        """Judge a backend anew, and forget what its engine had cached, and the speed of another one."""
        if change is EngineChange.SPECULATION:  # to us it is another backend under the same name
            self.forget(backend)
            return
        self.detector.renew(backend, change.value)
        if change is EngineChange.RELOAD:
            self.statistics.drop(STEPS, lambda key: key[0] == backend)
        if (replica := self.replicas.get(backend)) is not None:
            replica.prefixes.clear()

    def sent_elsewhere(self, backend: str, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Remember that a backend has a prompt which another gateway has sent."""
        replica = self.replicas.get(backend)
        if replica is None or not lengths:
            return
        now_s, cached = self.clock(), replica.prefixes.known_tokens(prefixes, lengths)
        work = weighed(lengths[-1] - cached, cached, self.attention)
        replica.hear(replica.prompt_token_s(replica.cost(replica.requests)) * work, now_s)
        replica.prefixes.remember(prefixes, lengths, now_s)

    def evicted(self, backend: str, unused_s: float | None, is_full: bool) -> None:
        """Forget what was not used for so many seconds, as an engine tells of its cache; None if it tells nothing."""
        if (replica := self.replicas.get(backend)) is not None:
            replica.prefixes.evicted(None if unused_s is None else self.clock() - unused_s, is_full)

    def correct(self, backend: str, factor: float) -> None:
        """Multiply the tokens per step of a backend's answers; what was learned from them before is dropped."""
        replica = self.replicas.get(backend)
        if backend not in self.corrections and factor != 1.0:
            if replica is not None:
                self.statistics.drop(PER_STEP, lambda key: key[0] == replica.arm)
            self.statistics.drop(STEPS, lambda key: key[0] == backend)
        self.corrections[backend] = factor
        if factor == 1.0:
            del self.corrections[backend]

    def warm_up(self) -> None:
        """Import nothing: there is nothing to import."""

    def maintenance(self) -> Job | None:
        """Return the fit of step times, and the reading of what others have told; None without anything new."""
        version = self.statistics.observations, len(self.replicas)
        if version == self._fitted:
            return None
        self._fitted, now_s = version, self.clock()
        due = [one for one in (self.per_step, self.lengths) if one.is_due(now_s)]

        def work(pause: Callable[[], object] = lambda: None, /) -> None:
            for means in due:
                means.arms = means.read()
                pause()
            factors = fit_factors(self.statistics.buckets(STEPS))
            self._usual = factors[""][0]
            for name, replica in [*self.replicas.items()]:
                replica.learn(*factors.get(name, (self._usual, 0.0)))

        return work

    # Explaining

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate by its cost in seconds, with the terms of the sum."""
        if self.pinned is not None:
            return assess(self.pinned, request, candidates)
        now_s = self.clock()
        delays = self.delays(request, candidates, self.kinds.of(request), now_s)
        costs = self.sum.of(request, delays, is_sent=False)
        self.troubles.price(request, candidates, costs, is_sent=False)
        return [
            Assessment(candidate.name, cost, self._note(request, candidate, delay))
            for candidate, delay, cost in zip(candidates, delays, costs, strict=True)
        ]

    def _note(self, request: RequestFeatures, candidate: Candidate, delay: Delay) -> str:
        note = (
            f"first token {delay.ttft_s:.3f} s, the rest {delay.decode_s:.3f} s "
            f"({delay.steps * delay.per_step:.0f} tokens, {delay.per_step:.2f} per step of "
            f"{1e3 * delay.step_s:.1f} ms), others delayed by {delay.others_s:.3f} s"
        )
        if cached := int(delay.cached_tokens):
            note += f"; {cached:,} tokens of the prompt cached, by {delay.replica.prefixes.goes_by}"
        known = known_to_tokens(self.calibration, candidate.method)
        if delay.context_tokens > known:
            note += f"; its acceptance is published for up to {known:,.0f} tokens of context"
        return "; ".join([note, *map(str, self.detector.found.get(candidate.name, ()))])

    def price(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Price:
        """Return what a request costs where that is least: its own time without waiting, and the delay of others."""
        delays = self.delays(request, candidates, self.kinds.of(request), self.clock())
        one = min(delays, key=lambda each: each.prefill_s + each.decode_s + each.others_s)
        tokens = max(1.0, one.steps * one.per_step * request.n)
        prompt_s = (1 + one.requests) * one.prefill_s
        rest_s = max(0.0, one.prefill_s + one.decode_s + one.others_s - prompt_s)
        return Price(prompt_s, rest_s / tokens, tokens, one.prefill_s)


def _mean_k(outcome: Outcome, steps: float) -> float | None:
    """Return the mean drafts of a step; the one that ends the prompt drafts nothing."""
    return None if outcome.drafted_tokens is None else outcome.drafted_tokens / max(1.0, steps - 1.0)


def _expected(calibration: str, arm: str, request: RequestFeatures) -> float:
    method, _, k = arm.partition(":")
    return expected_by_k(calibration, Method(method), int(k), request.workload, request.temperature)[-1]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else 1e-3 * milliseconds


def _copy(rng: Random) -> Random:
    copied = Random()
    copied.setstate(rng.getstate())
    return copied


_OK: Final = 200
_PLAIN: Final = (0.0,)
_NOBODY: Final = "\0"
"""The source of an answer that accuses nobody."""
_SKEW: Final = 0.2
"""What the mean of answers' lengths is above their median, as a logarithm."""
_NEW: Final = 0.01
_KNOWN: Final = 20.0
"""Answers below which a large deviation from what is expected may be the expectation's fault."""
_MIN_TOKENS, _EVIDENT = 8, 16
_MIN_STEPS: Final = 4.0
_SHORTEST: Final = 8.0
_FAR: Final = math.log(8.0)
_FAR_BEYOND: Final = 1.5
_ESTIMATE: Final = 0.25
"""Weight of an answer whose length is an estimate."""
_MOST_WAIT: Final = 0.2
"""Expected wait for other prompts, relative to the time of a prompt, up to which its time is learned from."""
_LONG_PROMPT: Final = 2048
_MOST_EXCESS: Final = 3.0
_MOST_LENGTH: Final = 9.0
