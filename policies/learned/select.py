"""How `learned` chooses for a request. Apart from the policy itself, so that it can be compiled."""

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
from policies.learned.propensity import draw, mixed, of_least_loaded, of_the_least, place_of_least, told
from policies.learned.settings import Exploration


# Made for each request, as what `policies.decision` has.
@dataclass(slots=True, init=False)
class Memo:
    """What was thought of a request when it was sent, to be compared with what came of it.

    Parameters
    ----------
    control
        It went where `least_loaded` would send it; None if rules decided, which takes no part in the comparison.
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
    """Chooses the candidate of the least cost, or now and then another one, to learn or to compare.

    Parameters
    ----------
    policy
        Whose decisions they are.
    rng
        What is drawn of each request: whether it goes by `least_loaded`, then where.
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
        self._quarantine = outlier_ejection
        self._cost = cost
        self._share, self._most = exploration.share, exploration.most
        self._rng = rng

    def choose(
        self, request: RequestFeatures, candidates: Sequence[Candidate], now_s: float, explain_candidates: bool
    ) -> Decision:
        """Choose, and keep count of what is sent where."""
        eligible = self._eligible(candidates, now_s)
        key = key_of(request)
        predictions = self._predictor.predict(request, key, eligible, now_s)
        cost = self._cost
        costs = [cost.of(request, prediction) for prediction in predictions]
        if request.explore:
            seen = [prediction.seen for prediction in predictions]
            learned = explore(self._share, self._most, costs, seen)
        else:
            learned = of_the_least(costs)
        guardrail = self._guardrail
        control_share = guardrail.control_share() if request.explore or guardrail.frozen else 0.0
        control = of_least_loaded(eligible, predictions) if control_share else learned
        by_control = control_share > 0 and guardrail.draw(self._rng)
        chosen = draw(control if by_control else learned, self._rng)
        if by_control:
            reason = "frozen" if guardrail.frozen else "control"
        else:
            reason = "least_delay" if costs[chosen] <= costs[place_of_least(costs)] else "explore"
        backend = eligible[chosen].name
        return Decision(
            backend,
            self._policy,
            reason,
            mixed(learned[chosen], control[chosen], control_share),
            told(eligible, predictions, learned, control, control_share) if explain_candidates else None,
            self._sent(request, key, backend, predictions[chosen], now_s, by_control),
        )

    def follow(
        self, decision: Decision, request: RequestFeatures, candidates: Sequence[Candidate], now_s: float
    ) -> Decision:
        """Keep count of what another policy decided, to learn from it too."""
        self._eligible(candidates, now_s)  # it knows of no quarantine; but who was out is let in again in time
        backend = decision.backend
        chosen = [candidate for candidate in candidates if candidate.name == backend]
        key = key_of(request)
        prediction = self._predictor.predict(request, key, chosen, now_s)[0]
        memo = self._sent(request, key, backend, prediction, now_s, None)
        return Decision(backend, decision.policy, decision.reason, decision.propensity, decision.considered, memo)

    def _eligible(self, candidates: Sequence[Candidate], now_s: float) -> Sequence[Candidate]:
        """Return who is not in quarantine, and let slowness fade that no request has confirmed."""
        slow = self._predictor.slow
        if slow:
            for backend in [*slow]:
                slowness = self._quarantine.slowness(backend, now_s)
                self._predictor.note_slowness(backend, slowness if slowness >= _HARDLY_SLOW else 1.0)
        return self._quarantine.admit(candidates, now_s)

    def _sent(
        self,
        request: RequestFeatures,
        key: Key,
        backend: str,
        prediction: Prediction,
        now_s: float,
        control: bool | None,
    ) -> Memo:
        """Note that a request is sent to a backend."""
        known = self._predictor.known[backend]
        mark = known.backlog.send(prediction.share, now_s)
        known.prefixes.remember(request)
        return Memo(key, prediction, mark, control)


_HARDLY_SLOW: Final = 1.01
