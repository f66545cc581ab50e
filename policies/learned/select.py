"""The choice of `learned` for a request, kept apart from the policy so that mypyc can compile it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Final

from backends.backend import Candidate
from policies.decision import CandidateScores, Decision
from policies.drafter_limits import sparing
from policies.features.request import RequestFeatures
from policies.guarded.guardrail import Guardrail
from policies.guarded.outlier_ejection import OutlierEjection
from policies.learned.cost import Cost
from policies.learned.models.backend_model import Mark, Prediction
from policies.learned.models.keys import Key, Templates
from policies.learned.models.step_time import LEAST_TOKENS
from policies.learned.predict import Predictor
from policies.learned.settings import Exploration
from policies.load import MIN_WEIGHT, draw, lowest_propensities
from policies.trouble.troubles import Troubles


def argmin(costs: list[float]) -> int:
    """Return the index of the lowest cost, the first of several."""
    best = 0
    for index, cost in enumerate(costs):
        if cost < costs[best]:
            best = index
    return best


def least_loaded_propensities(
    request: RequestFeatures, candidates: Sequence[Candidate], predictions: list[Prediction]
) -> list[float]:
    """Return the propensities of `least_loaded`, among those without thousands of tokens more to compute than others.

    A conversation of 100,000 tokens that is sent where it is not cached slows the whole pool, for no comparison.
    """
    scores, spared = [], sparing(request, candidates)
    tokens = []
    for index, one in enumerate(predictions):
        is_spared = spared is candidates or candidates[index] in spared
        tokens.append(one.prompt_tokens if is_spared else math.inf)
    most = min(tokens) + LEAST_TOKENS
    for index, one in enumerate(predictions):
        can = tokens[index] < most
        scores.append((one.requests + 1) / (candidates[index].weight or MIN_WEIGHT) if can else math.inf)
    return lowest_propensities(scores)


def explore(share: float, most: float, costs: list[float], observations: list[float]) -> list[float]:
    """Return the probability of choosing each candidate; the cheapest gets what the others leave.

    The other candidates are explored in proportion to their uncertainty. Their total probability is at most `most`, and
    so low that the expected cost of this request rises by no more than `share`: an expensive candidate is explored less
    than a cheap one. Exploration fades as observations accumulate.
    """
    best = argmin(costs)
    propensities = [0.0] * len(costs)
    propensities[best] = 1.0
    if len(costs) == 1 or share == 0 or most == 0:
        return propensities
    lowest = costs[best]
    total = largest = excess = 0.0
    for index, count in enumerate(observations):  # one loop instead of sums over generators: this runs per request
        if index != best:
            uncertainty = 1.0 / math.sqrt(1.0 + count / _KNOWN)
            propensities[index] = uncertainty
            total += uncertainty
            excess += uncertainty * (costs[index] - lowest)
            largest = max(largest, uncertainty)
    if total == 0:  # every other candidate has infinite observations
        return propensities
    probability = most * largest
    mean_excess = excess / total
    if mean_excess > 0:  # of costs that differ by next to nothing it may be zero
        probability = min(probability, share * lowest / mean_excess)
    for index, uncertainty in enumerate(propensities):
        if index != best:
            propensities[index] = probability * uncertainty / total
    propensities[best] = 1.0 - probability
    return propensities


_KNOWN: Final = 5.0
"""Number of observations above which the uncertainty falls noticeably."""


class Memo:
    """The prediction for a request when it was sent, to be compared with its outcome."""

    def __init__(self, key: Key, prediction: Prediction, mark: Mark | None, compared: bool) -> None:
        self.key = key
        self.prediction = prediction
        self.mark = mark  # mark in the backlog of its backend; None if the request was not sent
        # Whether the request is part of the comparison with `least_loaded`; not if another policy decided.
        self.compared = compared


class Chooser:
    """Chooses the candidate of the lowest cost, or sometimes another one, to explore or for the guardrail."""

    def __init__(
        self,
        policy: str,
        predictor: Predictor,
        guardrail: Guardrail,
        outlier_ejection: OutlierEjection,
        cost: Cost,
        exploration: Exploration,
        templates: Templates,
        troubles: Troubles,
    ) -> None:
        self._policy = policy  # policy name for the decisions
        self._predictor = predictor
        self._guardrail = guardrail
        self._outlier_ejection = outlier_ejection
        self._cost = cost
        self._templates = templates
        self._troubles = troubles
        self._share, self._most = exploration.share, exploration.most

    def choose(
        self,
        request: RequestFeatures,
        candidates: Sequence[Candidate],
        now_s: float,
        rng: Random,
        explain: bool,
        send: bool = True,
    ) -> Decision:
        """Choose a candidate, and add the request to its backlog."""
        if self._predictor.slow:
            self.update_slowness(now_s)
        ejection = self._outlier_ejection
        admitted = ejection.admit if send else ejection.admitted
        eligible = admitted(candidates, now_s, request.client)
        key = self._templates.key(request, counts=send)
        self._predictor.now_s = now_s
        predictions = self._predictor.predict(request, key, eligible)
        costs, mean_urgency = self._cost.of(request, predictions)
        if self._troubles.found:
            self._troubles.price(request, eligible, costs, is_sent=send)
        observations = [prediction.observations for prediction in predictions]
        by_control = self._guardrail.by_control(now_s)
        if by_control:
            propensities = least_loaded_propensities(request, eligible, predictions)
        else:
            propensities = explore(self._share if request.explore else 0.0, self._most, costs, observations)
        chosen = draw(propensities, rng)
        if by_control:
            reason = "frozen" if self._guardrail.frozen else "control"
        else:
            reason = "least_delay" if costs[chosen] <= min(costs) else "explore"
        considered = None
        if explain:
            considered = CandidateScores(eligible, [one.own_s for one in predictions], propensities, costs)
        backend, prediction, mark = eligible[chosen].name, predictions[chosen], None
        if send:
            self._cost.mean_urgency = mean_urgency
            mark = self._send(request, backend, prediction, eligible, predictions, now_s)
        return Decision(
            backend,
            self._policy,
            reason,
            propensities[chosen],
            considered,
            Memo(key, prediction, mark, len(candidates) > 1),
            int(request.prompt_tokens - prediction.prompt_tokens),
            self._predictor.backend_models[backend].prefixes.goes_by,
        )

    def follow(
        self, decision: Decision, request: RequestFeatures, candidates: Sequence[Candidate], now_s: float
    ) -> Decision:
        """Add a request for which another policy decided to the backlog, so that its outcome is learned from too."""
        self.update_slowness(now_s)
        self._outlier_ejection.admit(candidates, now_s)  # ends ejections in time, though the other policy ignores them
        chosen = [candidate for candidate in candidates if candidate.name == decision.backend]
        key = self._templates.key(request)
        self._predictor.now_s = now_s
        predictions = self._predictor.predict(request, key, chosen)
        backend = decision.backend
        mark = self._send(request, backend, predictions[0], chosen, predictions, now_s)
        memo = Memo(key, predictions[0], mark, False)
        return Decision(backend, decision.policy, decision.reason, decision.propensity, decision.considered, memo)

    def update_slowness(self, now_s: float) -> None:
        """Update the slowness of slow backends, which decays with time."""
        for backend in [*self._predictor.slow]:
            slowness = self._outlier_ejection.slowness(backend, now_s)
            self._predictor.set_slowness(backend, slowness if slowness >= _MIN_SLOWNESS else 1.0)

    def _send(
        self,
        request: RequestFeatures,
        backend: str,
        prediction: Prediction,
        candidates: Sequence[Candidate],
        predictions: list[Prediction],
        now_s: float,
    ) -> Mark:
        """Update the backlogs of all candidates, and add the request to the chosen one."""
        models = self._predictor.backend_models
        for index, one in enumerate(predictions):
            models[candidates[index].name].backlog.update(now_s, one.requests)
        model = models[backend]
        model.prefixes.remember(request.prefix, request.prefix_tokens, now_s)
        self._predictor.prefill_s += _NEW * (prediction.prefill_s - self._predictor.prefill_s)
        return model.backlog.send(prediction, now_s)


_NEW: Final = 0.01
_MIN_SLOWNESS: Final = 1.01
"""Slowness below which a backend counts as normal again."""
