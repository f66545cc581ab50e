"""The choice of `learned` for a request, kept apart from the policy so that mypyc can compile it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from backends.backend import Candidate
from policies.decision import Decision
from policies.features.request import RequestFeatures
from policies.learned.cost import Cost
from policies.learned.exploration import explore
from policies.learned.guardrail import Guardrail
from policies.learned.models.backlog import Mark
from policies.learned.models.buckets import Key, key_of
from policies.learned.outlier_ejection import OutlierEjection
from policies.learned.predict import Prediction, Predictor
from policies.learned.propensity import (
    argmin,
    candidate_scores,
    draw,
    greedy_propensities,
    least_loaded_propensities,
    mixed,
)
from policies.learned.settings import Exploration


# Created per request, like the records in `policies.decision`.
@dataclass(slots=True, init=False)
class Memo:
    """The prediction for a request when it was sent, to be compared with its outcome.

    Parameters
    ----------
    control
        Whether `least_loaded` decided; None if pinned rules did, which are not part of the comparison.
    """

    key: Key
    prediction: Prediction
    mark: Mark
    control: bool | None

    def __init__(self, key: Key, prediction: Prediction, mark: Mark, control: bool | None) -> None:
        self.key = key
        self.prediction = prediction
        self.mark = mark
        self.control = control


class Chooser:
    """Chooses the candidate of the lowest cost, or sometimes another one, to explore or for the guardrail.

    Parameters
    ----------
    policy
        Policy name for the decisions.
    rng
        Source of the random choices: first whether `least_loaded` decides, then the backend.
    """

    def __init__(
        self,
        policy: str,
        predictor: Predictor,
        guardrail: Guardrail,
        outlier_ejection: OutlierEjection,
        cost: Cost,
        exploration: Exploration,
        rng: Random,
    ) -> None:
        self._policy = policy
        self._predictor = predictor
        self._guardrail = guardrail
        self._outlier_ejection = outlier_ejection
        self._cost = cost
        self._share, self._most = exploration.share, exploration.most
        self._rng = rng

    def choose(
        self, request: RequestFeatures, candidates: Sequence[Candidate], now_s: float, explain_candidates: bool
    ) -> Decision:
        """Choose a candidate, and add the request to its backlog."""
        eligible = self._eligible(candidates, now_s)
        key = key_of(request)
        predictions = self._predictor.predict(request, key, eligible, now_s)
        cost = self._cost
        costs = [cost.of(request, prediction) for prediction in predictions]
        if request.explore:
            observations = [prediction.observations for prediction in predictions]
            learned = explore(self._share, self._most, costs, observations)
        else:
            learned = greedy_propensities(costs)
        guardrail = self._guardrail
        control_share = guardrail.control_share() if request.explore or guardrail.frozen else 0.0
        control = least_loaded_propensities(eligible, predictions) if control_share else learned
        by_control = control_share > 0 and guardrail.draw(self._rng)
        chosen = draw(control if by_control else learned, self._rng)
        if by_control:
            reason = "frozen" if guardrail.frozen else "control"
        else:
            reason = "least_delay" if costs[chosen] <= costs[argmin(costs)] else "explore"
        backend = eligible[chosen].name
        return Decision(
            backend,
            self._policy,
            reason,
            mixed(learned[chosen], control[chosen], control_share),
            candidate_scores(eligible, predictions, learned, control, control_share) if explain_candidates else None,
            self._send(request, key, backend, predictions[chosen], now_s, by_control),
        )

    def follow(
        self, decision: Decision, request: RequestFeatures, candidates: Sequence[Candidate], now_s: float
    ) -> Decision:
        """Add a request for which another policy decided to the backlog, so that its outcome is learned from too."""
        self._eligible(candidates, now_s)  # ends ejections and slowness in time, though the other policy ignores them
        backend = decision.backend
        chosen = [candidate for candidate in candidates if candidate.name == backend]
        key = key_of(request)
        prediction = self._predictor.predict(request, key, chosen, now_s)[0]
        memo = self._send(request, key, backend, prediction, now_s, None)
        return Decision(backend, decision.policy, decision.reason, decision.propensity, decision.considered, memo)

    def _eligible(self, candidates: Sequence[Candidate], now_s: float) -> Sequence[Candidate]:
        """Return the candidates that are not ejected, after updating the slowness of slow backends, which decays."""
        slow = self._predictor.slow
        if slow:
            for backend in [*slow]:
                slowness = self._outlier_ejection.slowness(backend, now_s)
                self._predictor.set_slowness(backend, slowness if slowness >= _MIN_SLOWNESS else 1.0)
        return self._outlier_ejection.admit(candidates, now_s)

    def _send(
        self,
        request: RequestFeatures,
        key: Key,
        backend: str,
        prediction: Prediction,
        now_s: float,
        control: bool | None,
    ) -> Memo:
        """Add a request to the backlog and the prefix memory of a backend."""
        model = self._predictor.backend_models[backend]
        mark = model.backlog.send(prediction.share, now_s)
        model.prefixes.remember(request)
        return Memo(key, prediction, mark, control)


_MIN_SLOWNESS: Final = 1.01
"""Slowness below which a backend counts as normal again."""
