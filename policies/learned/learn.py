"""Learning from finished requests."""

from __future__ import annotations

import math
from typing import Final

from backends.speculation import Method
from policies.decision import Decision, Outcome
from policies.experiment.blocks import kind_of, work_of
from policies.features.request import TYPICAL_TOKENS, RequestFeatures
from policies.guarded.guardrail import Guardrail
from policies.learned.cost import Delay, weighed
from policies.learned.detector import EVIDENT_TOKENS
from policies.learned.known import Drafted, Known
from policies.learned.prefix_memory import ESTIMATE
from policies.learned.prior import expected_by_k
from policies.learned.replica import STEPS, KnownReplica
from policies.learned.table import ANSWERS, Groups, mean_of


class Lessons:
    """Adds outcomes to what is known, and compares them with expectations."""

    def __init__(self, known: Known, guardrail: Guardrail, *, detects: bool) -> None:
        self._known, self._guardrail, self._detects = known, guardrail, detects

    def learn(self, outcome: Outcome, now_s: float) -> None:
        """Learn from a finished request."""
        known, request, delay = self._known, outcome.request, _delay(outcome.decision)
        replica = known.replicas.get(outcome.decision.backend)
        is_beyond = replica is not None and replica.reach.is_beyond(outcome)
        self.end(outcome.decision, now_s, is_beyond=is_beyond)
        if outcome.status != _OK or outcome.output_tokens < 1:
            return
        kind = known.kinds.of(request) if delay is None else delay.kind
        share = known.shares.weight(request.client)
        self._learn_length(outcome, kind.lengths, share, now_s)
        if outcome.shadow:
            self.learn_shadow(outcome, share, now_s)
        if replica is None:
            return
        bins, workload, template = kind.answer
        tokens = outcome.output_tokens / request.n
        known.statistics.add_at(now_s, ANSWERS, (replica.name, bins, workload, template), (1.0, tokens))
        reach, source = replica.reach, known.detector.see(request, outcome.output_tokens)
        is_drafted = not is_beyond and replica.was_drafted(now_s - outcome.e2e_s)
        teaches = is_drafted or not reach.is_known  # without a known cause, it is learned but is no evidence
        accuses = is_drafted and not (replica.others and reach.is_known and reach.harms_others) and self._detects
        per_step, steps = self._per_step(outcome, replica), float(outcome.steps or 0)
        if per_step is not None:
            steps = outcome.output_tokens / request.n / per_step
            if is_drafted and reach.is_known:
                reach.per_step += (_NEW if reach.per_step else 1.0) * (per_step - reach.per_step)
        met = float(replica.requests), 0.0, 0.0
        if delay is not None:
            met = replica.met(delay, now_s, max(1.0, steps))
        if teaches and per_step is not None and replica.k and outcome.output_tokens >= _MIN_TOKENS:
            self._learn_drafts(outcome, replica, kind.groups, per_step, met[0], source, share, now_s, accuses=accuses)
        elif not outcome.shadow:  # it shows which kinds of requests there are
            known.per_step.add("", kind.groups, 0.0, share, 1.0, now_s)
        replica.shown += _NEW * ((0.0 if per_step is None else 1.0) - replica.shown)
        if per_step is None and replica.shown < _HARDLY:
            self._learn_counted(outcome, replica, share, now_s)
        if delay is None:
            return
        if teaches and steps > _MIN_STEPS:
            self._learn_steps(outcome, delay, replica, steps, met, source, now_s)
        if delay.is_compared and not outcome.was_paused:
            self._guardrail.observe(now_s, outcome.e2e_s, work_of(outcome), kind_of(request))
        self._learn_prompt(outcome, delay, replica, now_s)

    def end(self, decision: Decision, now_s: float, *, is_beyond: bool = False) -> None:
        """Remove a request from the work of its replica."""
        delay, replica = _delay(decision), self._known.replicas.get(decision.backend)
        if delay is not None and replica is not None and delay.replica is replica:  # else another replica had the name
            replica.end(delay, now_s, is_beyond=is_beyond and replica.reach.harms_others)

    def learn_shadow(self, outcome: Outcome, share: float, now_s: float) -> None:
        """Learn what other arms would have reached on a text; its own arm only corrects the bias of replays."""
        known, request, delay = self._known, outcome.request, _delay(outcome.decision)
        groups = (known.kinds.of(request) if delay is None else delay.kind).groups
        replica, is_overlong = known.replicas.get(outcome.decision.backend), _is_overlong(outcome, delay)
        for arm, replayed in outcome.shadow.items():
            if replica is not None and arm == replica.arm:
                measured = self._per_step(outcome, replica)
                if measured is not None and replica.name not in known.detector.found and replica.depth is None:
                    known.shadow_bias.compare(arm, measured, replayed)
                continue
            method, _, k = arm.partition(":")
            expected = self._by_k(Method(method), int(k), request, outcome)[-1]
            excess = math.log(max(1.0, known.shadow_bias.corrected(arm, replayed))) - expected
            if not is_overlong or excess - known.per_step.mean(arm, groups) <= _WELL:
                known.per_step.add(arm, groups, excess, share, 1.0, now_s)

    def _learn_length(self, outcome: Outcome, groups: Groups, share: float, now_s: float) -> None:
        """Learn the tokens of an answer; clip one that is too far from the expectation."""
        request, lengths = outcome.request, self._known.lengths
        tokens = max(_SHORTEST, outcome.output_tokens / request.n)
        if request.max_tokens is not None:
            tokens = min(tokens, float(max(1, request.max_tokens)))
        expected = mean_of("", lengths.around(groups))
        log = min(max(math.log(tokens / TYPICAL_TOKENS), expected - _FAR), expected + _FAR)
        weight = _ESTIMATE if outcome.is_estimated else 1.0
        lengths.add("", groups, log, weight * share, weight, now_s)

    def _per_step(self, outcome: Outcome, replica: KnownReplica) -> float | None:
        """Return the tokens per step of an answer, clipped to its replica's range; None if unknown or far beyond it."""
        per_step, most = outcome.tokens_per_step, replica.k + 1.0
        if per_step is None:
            return None
        if self._known.corrections:
            per_step *= self._known.corrections.get(replica.name, 1.0)
        return min(max(1.0, per_step), most) if per_step <= _FAR_BEYOND * most else None

    def _by_k(self, method: Method, k: int, request: RequestFeatures, outcome: Outcome) -> tuple[float, ...]:
        context = outcome.prompt_tokens + outcome.output_tokens / request.n / 2
        return expected_by_k(self._known.calibration, method, k, request.workload, request.temperature, context)

    def _learn_drafts(
        self,
        outcome: Outcome,
        replica: KnownReplica,
        groups: Groups,
        per_step: float,
        batch: float,
        source: str | None,
        share: float,
        now_s: float,
        *,
        accuses: bool,
    ) -> None:
        """Learn the tokens per step of an answer, unless they indicate a fault of its drafter."""
        known, request = self._known, outcome.request
        by_k = self._by_k(replica.method, replica.k, request, outcome)
        mean = mean_of(replica.arm, known.per_step.around(groups)) + replica.apart
        place = replica.place(batch, _mean_k(outcome, outcome.output_tokens / per_step))
        excess, weight = replica.excess(by_k, per_step, place)
        is_runaway = excess - mean > _WELL and _is_overlong(outcome, _delay(outcome.decision))
        is_lesson = weight > 0.0 and not is_runaway
        lesson = Drafted(groups, excess, weight, share) if is_lesson else None
        expected, shadow = None, outcome.shadow.get(replica.arm)
        if accuses and not request.restricted and outcome.output_tokens >= EVIDENT_TOKENS and weight > 0.0:
            if not replica.has_shadow:
                expected = replica.per_step_at(by_k, mean, place)
            elif shadow is not None and known.shadow_bias.knows(replica.arm):  # normal texts may have no repetition
                expected = known.shadow_bias.corrected(replica.arm, shadow)
        counters = (0, 0) if replica.has_shadow else replica.drafts
        for one in known.detector.observe_drafts(
            replica.name,
            (replica.arm, request.workload, groups[1][0]),
            expected,
            per_step,
            source,
            counters,
            lesson,
            now_s,
        ):
            known.learn_drafts(replica, one, now_s)

    def _learn_counted(self, outcome: Outcome, replica: KnownReplica, share: float, now_s: float) -> None:
        """Learn what an answer does not show from its engine's counters, for requests of all kinds."""
        known = self._known
        always_drafts = replica.k > 0 and not replica.has_shadow and replica.depth is None
        if always_drafts and replica.name not in known.detector.found and (counted := replica.counted()) is not None:
            expected = self._by_k(replica.method, replica.k, outcome.request, outcome)[-1]
            known.learn_drafts(replica, Drafted(((),), math.log(counted) - expected, 1.0, share), now_s)

    def _learn_steps(
        self,
        outcome: Outcome,
        delay: Delay,
        replica: KnownReplica,
        steps: float,
        met: tuple[float, float, float],
        source: str | None,
        now_s: float,
    ) -> None:
        """Learn step times under the load that an answer met; only measured ones are evidence of a fault."""
        step_s = _generation_s(outcome, delay, steps, now_s) / (steps - 1)
        place = replica.place(met[0], _mean_k(outcome, steps))
        sums, expected_s = replica.observation(step_s, met, place)
        if sums is None:
            return
        self._known.statistics.add_at(now_s, STEPS, (replica.name,), sums)
        if replica.observed >= _KNOWN and outcome.tpot_s and not outcome.is_estimated and self._detects:
            # Prompts from other gateways lengthen steps too. They are heard of too late to be in the load met.
            expected_s += replica.heard_s(delay) / steps
            self._known.detector.observe_speed(replica.name, step_s / expected_s, source, now_s)

    def _learn_prompt(self, outcome: Outcome, delay: Delay, replica: KnownReplica, now_s: float) -> None:
        """Learn the prefill time of a prompt that hardly waited, and what its engine had cached."""
        cached, request = outcome.cached_tokens, outcome.request
        joined_s = (replica.joins if delay.requests else 1.5) * delay.step_s
        waited_s = delay.ttft_s - joined_s - delay.prefill_s
        if outcome.ttft_s is not None and waited_s <= _MOST_WAIT * delay.prefill_s:
            work = delay.prompt_work
            if cached is not None:
                work = weighed(outcome.prompt_tokens - cached, cached, self._known.attention)
            replica.prompts.learn(outcome.ttft_s - joined_s - waited_s, work, replica.priors[-1].per_prompt_token_s)
        if cached is not None:
            replica.prefixes.learn(delay.cached_tokens, cached)
        if replica.prefixes.goes_by is not ESTIMATE:  # evictions depend on when its use ended
            replica.prefixes.remember(request.prefix, request.prefix_tokens, now_s, is_asked=False)


def _delay(decision: Decision) -> Delay | None:
    """Return the expected delay of a request as of its sending; None if another policy decided."""
    memo = decision.memo
    return memo if isinstance(memo, Delay) else None


def _generation_s(outcome: Outcome, delay: Delay, steps: float, now_s: float) -> float:
    """Return the seconds after the first token; 0 if unknown.

    For an answer in one piece, they are what is left after the expected start, if that is short.
    """
    if outcome.tpot_s:
        return outcome.tpot_s * (outcome.output_tokens - 1)
    request, sent_s = outcome.request, delay.mark[0]  # later than its arrival, if another replica had failed it
    is_whole = outcome.ttft_s is None and not request.stream and request.n == 1 and not outcome.was_paused
    # Judged by its measured time, slow answers would be learned more often than fast ones.
    is_short = delay.ttft_s <= _SHORT_START * steps * delay.step_s
    return max(0.0, min(outcome.e2e_s, now_s - sent_s) - delay.ttft_s) if is_whole and is_short else 0.0


def _is_overlong(outcome: Outcome, delay: Delay | None) -> bool:
    """Return whether an answer is so much longer than expected that it may be endless repetition."""
    return delay is not None and outcome.output_tokens > _RUNAWAY * delay.tokens * outcome.request.n


def _mean_k(outcome: Outcome, steps: float) -> float | None:
    """Return the mean drafts per step; the step that ends the prompt drafts nothing."""
    return None if outcome.drafted_tokens is None else outcome.drafted_tokens / max(1.0, steps - 1.0)


_OK: Final = 200
_NEW: Final = 0.05
_KNOWN: Final = 20.0
"""Answers below which a large deviation may be the expectation's fault."""
_MIN_TOKENS: Final = 8
_MIN_STEPS: Final = 4.0
_SHORT_START: Final = 0.25
"""Longest expected start of an answer in one piece, relative to its steps, with which their time is learned."""
_SHORTEST: Final = 8.0
_FAR: Final = math.log(8.0)
_FAR_BEYOND: Final = 1.5
_HARDLY: Final = 0.1
"""Share of answers that show their tokens per step beyond which only those teach: the counters include them too."""
_ESTIMATE: Final = 0.25
"""Weight of an answer whose length is an estimate."""
_MOST_WAIT: Final = 0.2
"""Longest expected wait for other prompts, relative to a prompt's own time, with which its time is learned."""
_RUNAWAY: Final = 4.0
_WELL: Final = 0.4
"""By how much an overlong answer may be drafted better than expected, as a logarithm, and still be learned."""
