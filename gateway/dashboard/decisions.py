"""Decisions of a model that are sampled while a dashboard is open, with what came of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from backends.backend import Backend
from gateway.dashboard.document import Accuracy, CandidateView, DecisionView, Ended, RequestView
from gateway.dashboard.sampled import SampledExchange
from gateway.relay.observers import EndedExchange, Observer
from gateway.routing.router import RoutedRequest
from policies.build import predicted_s
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import CandidateScores, Decision
from policies.roles import Scoring, assess

SHOWN = 50
SAMPLE_S = 0.25
"""Least seconds between two samples, so that their cost has a bound."""
ACCURACY_S = 600.0
_MOST_RATIOS = 500
_LEAST_RATIOS = 5


class SampledDecisions:
    """The sampled decisions of a model; follows its exchanges only while a dashboard is open."""

    def __init__(self, explains: Callable[[], bool]) -> None:
        # Whether the policy is to include scores in its decisions apart from those sampled here.
        self._explains = explains
        self._next_s = 0.0
        self._count = 0
        self._shown: deque[DecisionView] = deque(maxlen=SHOWN)
        self._ratios: dict[str, deque[tuple[float, float]]] = {}  # by backend: time, measured over predicted

    def document(self) -> list[DecisionView]:
        """Return the last decisions, the newest last."""
        return list(self._shown)

    def accuracy(self, backend: str) -> Accuracy | None:
        """Return how predictions for a backend compared with what came; None if too few did."""
        oldest_s = time.monotonic() - ACCURACY_S
        ratios = sorted(ratio for at_s, ratio in self._ratios.get(backend, ()) if at_s >= oldest_s)
        count = len(ratios)
        if count < _LEAST_RATIOS:
            return None
        return Accuracy(count, *[ratios[int(share * (count - 1) + 0.5)] for share in (0.1, 0.5, 0.9)])

    def keep(self, backends: Sequence[str]) -> None:
        """Forget the backends that are gone."""
        for name in self._ratios.keys() - set(backends):
            del self._ratios[name]

    # Called by the relay

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer | None:
        """Return an observer of the exchange if another sample is due, and have its decision explained."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + SAMPLE_S
        if isinstance(routed.model.policy, Scoring):
            routed.model.policy.explain_candidates = True
        return SampledExchange(routed, self.sent, self.ended)

    def sent(
        self, routed: RoutedRequest, decision: Decision, candidates: Sequence[Backend], failed: DecisionView | None
    ) -> DecisionView | None:
        """Record a decision before the load of its backend changes; `failed` is the one before it."""
        policy, features = routed.model.policy, routed.features
        if failed is not None:
            failed.ended = Ended("retried", None, None, None, None, None)
        if isinstance(policy, Scoring):
            policy.explain_candidates = self._explains()
        if features.endpoint is Endpoint.OTHER:
            return None
        self._count += 1
        view = DecisionView(
            self._count,
            time.time(),
            _request_view(features),
            decision.backend,
            decision.policy,
            decision.reason,
            round(decision.propensity, 5),
            _short(predicted_s(decision)),
            _candidate_views(routed, decision, candidates),
        )
        self._shown.append(view)
        return view

    def ended(self, view: DecisionView | None, ended: EndedExchange) -> None:
        """Record the outcome of the request."""
        policy = ended.routed.model.policy
        if isinstance(policy, Scoring):
            policy.explain_candidates = self._explains()  # also if it was never sent
        if view is None:
            return
        outcome = ended.outcome
        if outcome is None:
            view.ended = Ended(ended.label, None, None, None, None, None)
            return
        view.ended = Ended(
            ended.label,
            _short(outcome.e2e_s),
            _short(outcome.ttft_s),
            _short(outcome.tpot_s),
            outcome.output_tokens,
            _short(outcome.tokens_per_step),
        )
        if view.predicted_s and ended.label == "ok" and not (ended.retried_from or ended.rescued_from):
            ratios = self._ratios.setdefault(view.backend, deque(maxlen=_MOST_RATIOS))
            ratios.append((time.monotonic(), outcome.e2e_s / view.predicted_s))


def _request_view(features: RequestFeatures) -> RequestView:
    return RequestView(
        features.endpoint.value,
        features.stream,
        features.n,
        features.temperature,
        features.prompt_tokens,
        features.max_tokens,
        features.workload,
        features.template,
        round(features.overlap, 3),
        round(features.code_share, 3),
        features.turns,
        features.structured,
        features.tools,
    )


def _candidate_views(routed: RoutedRequest, decision: Decision, candidates: Sequence[Backend]) -> list[CandidateView]:
    """Return the candidates with the scores in the decision, or else with what the policy says of them."""
    considered = decision.considered
    if considered is not None:
        scores = _scores(considered)
    else:
        implied = 1.0 - decision.propensity if len(candidates) == 2 or decision.propensity >= 1.0 else None
        chosen, assessed = decision.backend, _assessed(routed, candidates)
        scores = {
            each.name: (assessed.get(each.name), None, decision.propensity if each.name == chosen else implied)
            for each in candidates
        }
    views = []
    for each in candidates:
        score, predicted, propensity = scores.get(each.name, (None, None, 0.0))
        requests = each.in_flight + each.load.others
        views.append(CandidateView(each.name, _short(score), _short(predicted), _short(propensity), requests))
    return views


def _short(number: float | None) -> float | None:
    return None if number is None else round(number, 5)


def _assessed(routed: RoutedRequest, candidates: Sequence[Backend]) -> dict[str, float | None]:
    policy = routed.model.policy
    try:
        return {each.backend: each.score for each in assess(policy, routed.features, candidates)}
    except Exception as error:  # noqa: BLE001 -- plugins may raise anything, and the request is to be sent
        routed.model.fallback.note(policy.name, "assess", error)
        return {}


def _scores(considered: CandidateScores) -> dict[str, tuple[float | None, float | None, float | None]]:
    costs: Sequence[float | None] = considered.costs or [None] * len(considered.candidates)
    rows = zip(considered.candidates, costs, considered.predicted_s, considered.propensities, strict=True)
    return {one.name: (cost, predicted, propensity) for one, cost, predicted, propensity in rows}
