"""The part of this process in one comparison of a model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from backends.backend import Backend
from gateway.relay.accounting import FAILED, against_objective
from gateway.relay.observers import EndedExchange, Observer
from gateway.relay.outgoing import DEEP
from gateway.rooms.compare.definition import Definition, longer_block_s, other_policy
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.router import NO_SLO
from policies.build import learned_of
from policies.decision import Decision, Outcome
from policies.experiment.evidence import Evidence
from policies.experiment.experiment import Experiment
from policies.experiment.verdict import SHOWN, Stage, Verdict, verdict_of
from policies.features.request import ANY_REQUEST, RequestFeatures
from policies.learned.policy import Learned
from policies.policy import Choose, Policy
from policies.statistics import Statistics

_UNFREE = frozenset({"override", "affinity"})
"""Policies of decisions that had no choice."""


class Running(Observer):
    """A comparison: it narrows the candidates of requests, and observes their outcomes."""

    needs_answer = False

    def __init__(self, definition: Definition, statistics: Statistics) -> None:
        self.definition = definition
        self.plan = definition.plan()
        self._statistics = statistics
        self._experiment = Experiment(self.plan, statistics)
        self._others = {name: other_policy(name) for name in definition.policies}
        self.sound_s = time.monotonic()  # when the arms last served as at the start
        self._seen = -1
        self._verdict: Verdict | None = None
        self._evidence = Evidence(self.plan, statistics)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.definition.ended_s is None

    def choose(self, policy: Policy, features: RequestFeatures, candidates: Sequence[Backend]) -> Decision:
        """Assign a request to an arm; within it, the model's policy chooses, or the policy whose turn it is."""
        given = self._experiment.give(features, candidates)
        chooses = self._choosing(policy)
        decision = chooses(features if policy.reads_requests else ANY_REQUEST, [*given.candidates])
        if given.chance < 1.0 or given.arm:
            propensities = [each * given.chance for each in decision.propensities]
            chance = decision.propensity * given.chance
            decision = replace(
                decision, arm=given.arm, arm_chance=given.chance, propensity=chance, propensities=propensities
            )
        return decision

    def _choosing(self, policy: Policy) -> Choose:
        arm = self._experiment.arm_now("") if self._others else None
        other = None if arm is None or arm == policy.name else self._others[arm]
        if other is None:
            return policy.choose
        if isinstance(policy, Learned):  # it continues to learn while others decide
            return lambda request, candidates: policy.follow(other.choose(request, candidates), request, candidates)
        return other.choose

    def depth(self, backend: str) -> int | None:
        """Return the current draft depth of a replica; None if depths are not compared."""
        depths = self.definition.depths
        arm = self._experiment.arm_now(backend) if depths else None
        return None if arm is None else depths[[*self.definition.replicas].index(arm)]

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer:
        """Return itself: it keeps no state per request."""
        return self

    def on_end(self, ended: EndedExchange) -> None:
        """Add a request to the evidence."""
        sent_s = ended.arrived_s + ended.waited_s
        if ended.retried_from or ended.rescued_from:
            self._experiment.failed(ended.retried_from or ended.rescued_from, ended.ended_s - sent_s)
        elif ended.decision is None or ended.decision.policy in _UNFREE:
            return
        elif ended.label in FAILED:
            self._experiment.failed(ended.decision.backend, ended.ended_s - sent_s)
        elif ended.outcome is not None and not ended.was_paused and self._has_arm(ended.outcome):
            self._experiment.observe(ended.outcome, is_late=_is_late(ended))

    def _has_arm(self, outcome: Outcome) -> bool:
        """Return whether a request was served by its arm; only some endpoints can set the draft depth."""
        return not self.definition.depths or outcome.request.endpoint in DEEP

    def close(self, now_s: float) -> None:
        """Add finished blocks to the evidence; runs on the event loop, where requests are added too."""
        self._experiment.close(now_s)

    def fitted(self) -> Definition | None:
        """Return its definition with longer blocks; None if they fit, are the longest, or were requested."""
        block_s = longer_block_s(self._experiment, self._evidence) if self.definition.is_fitted else None
        return None if block_s is None else self.definition.with_longer_blocks(block_s, len(self._evidence.blocks))

    def go_on(self, definition: Definition) -> None:
        """Continue with a new definition: it has ended, or has longer blocks."""
        self.definition, plan = definition, definition.plan()
        if plan.id != self.plan.id:
            self.plan = plan
            self._experiment.go_on(plan)
            self._evidence = Evidence(plan, self._statistics)
            self._verdict = None

    def is_over(self, now_s: float) -> bool:
        """Return whether its time is over."""
        return now_s >= self.definition.began_s + (self.definition.for_s or math.inf)

    def judge(self, now_s: float) -> Verdict:
        """Return the verdict so far; runs in a thread, since it takes milliseconds if the evidence has changed."""
        is_over, verdict = self.is_over(now_s), self._verdict
        if verdict is None or self._seen != self._statistics.observations or is_over:
            self._seen = self._statistics.observations
            self._evidence = Evidence(self.plan, self._statistics)
            verdict = verdict_of(self._evidence, self.definition.until, is_over=is_over)
            if self.definition.whole and not is_over and verdict.stage in {Stage.DECIDED, Stage.ALIKE}:
                verdict = replace(verdict, stage=Stage.RUNNING, sentence=f"So far, {verdict.sentence}")
            self._verdict = verdict
        return verdict

    def document(self) -> dict[str, Any]:
        """Return everything known, for `/admin/compare`; if it has ended, as of its end."""
        definition = self.definition
        fields = definition.document()
        if not self.is_running:
            return fields
        verdict = self.judge(time.time())
        cost = self._evidence.cost(SHOWN)
        return fields | {
            "minutes": round((time.time() - definition.began_s) / 60.0, 1),
            "sentence": verdict.sentence,
            "blocks": verdict.blocks,
            "harmed": verdict.harmed,
            "needed_block_s": longer_block_s(self._experiment, self._evidence),
            "arms": {arm: self._arm(arm) for arm in definition.replicas},
            "findings": [_rounded(asdict(each)) for each in verdict.findings],
            "cost": None if cost.ratio != cost.ratio else _rounded(cost._asdict()),
        }

    def _arm(self, arm: str) -> dict[str, Any]:
        """Return the figures of an arm, over all blocks that count."""
        sums, replica_s = self._evidence.total(arm), 0.0
        for number, arms in self._evidence.blocks.items():
            if arm in arms and arms[arm].chosen:
                replica_s += self.plan.of_block(number)[0].block_s * arms[arm].replicas / arms[arm].chosen
        return {
            "replicas": self.definition.replicas[arm],
            "requests": round(sums.chosen),
            "failed": round(sums.failed),
            "missed": _over(sums.missed, sums.judged),
            "request_s": _over(sums.seconds, sums.requests),
            "ttft_s": _over(sums.ttft_s, sums.streams),
            "tpot_s": _over(sums.decode_s, sums.decoded),
            "tokens_per_replica_s": _over(sums.output_tokens, replica_s),
        }


def _is_late(ended: EndedExchange) -> bool | None:
    """Return whether a request missed its objective or its model's; None without one, or if unknown."""
    learned, features = learned_of(ended.routed.model.policy), ended.routed.features
    slo = NO_SLO if learned is None else learned.settings.slo.seconds
    if slo == NO_SLO == (features.slo_ttft_s, features.slo_tpot_s):
        return None
    return {"kept": False, "missed": True}.get(against_objective(ended, slo))


def _over(value: float, by: float) -> float | None:
    return float(f"{value / by:.4g}") if by else None


def _rounded(value: Any) -> Any:
    """Return figures rounded for readers."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if hasattr(value, "_asdict"):
            return _rounded(value._asdict())
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
