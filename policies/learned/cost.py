"""The cost that a routing decision minimises."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

from policies.features.request import RequestFeatures
from policies.learned.models.backend_model import Prediction
from policies.learned.settings import Objective


class Cost(ABC):
    """The cost of a prediction; a class, because mypyc calls a method faster than a function object."""

    def __init__(self) -> None:
        # Mean additional weight of a second for missed SLOs, over the requests sent so far; set by the caller.
        self.mean_urgency = 0.0

    @abstractmethod
    def of(self, request: RequestFeatures, predictions: list[Prediction]) -> tuple[list[float], float]:
        """Return the cost of a request on each backend, and the `mean_urgency` after that.

        Costs are in seconds or weighted seconds; lower is better.
        """


_TIE_BREAK: Final = 0.05
"""Weight of the total delay for an objective other than latency, so that ties go to the faster backend."""

_URGENCY: Final = 2.0
"""Additional weight of a second if the request is sure to miss its SLO."""

_SOFTNESS: Final = 0.6
"""Scale of a prediction's relative error: answers differ in acceptance, and the load changes while they run."""

_KEEP: Final = 0.998
"""Decay of the mean urgency per prediction; with four candidates, about the last hundred requests count."""


def cost_of(objective: Objective, slo_ttft_s: float | None, slo_tpot_s: float | None) -> Cost:
    """Return the cost function of an objective."""
    if objective is Objective.GOODPUT:
        return _Goodput(slo_ttft_s, slo_tpot_s)
    if objective is Objective.TTFT:
        return _Weighted(1.0 + _TIE_BREAK, _TIE_BREAK, _TIE_BREAK)
    if objective is Objective.TPOT:
        return _Weighted(_TIE_BREAK, 1.0, 1.0 + _TIE_BREAK)
    return _Weighted(1.0, 1.0, 1.0)


class _Weighted(Cost):
    """The seconds to the first token, from there to the last, and of others, each with a weight."""

    def __init__(self, ttft: float, decode: float, others: float) -> None:
        super().__init__()
        self._ttft = ttft
        self._decode = decode
        self._others = others

    def of(self, request: RequestFeatures, predictions: list[Prediction]) -> tuple[list[float], float]:
        ttft, decode, others = self._ttft, self._decode, self._others * request.overuse
        return [ttft * one.ttft_s + decode * one.decode_s + others * one.others_s for one in predictions], 0.0


class _Goodput(Cost):
    """The total delay, in which a second weighs more if an SLO is at risk.

    The request's own time is weighted by its urgency, and the time that it takes from others by the mean urgency; if
    all requests have the same bounds, this equals `latency`. A fixed penalty for each expected miss meets fewer SLOs,
    because it ignores that a request slows others for as long as it runs. docs/when-it-pays.md has the figures.
    """

    def __init__(self, slo_ttft_s: float | None, slo_tpot_s: float | None) -> None:
        super().__init__()
        self._slo_ttft_s = slo_ttft_s
        self._slo_tpot_s = slo_tpot_s

    def of(self, request: RequestFeatures, predictions: list[Prediction]) -> tuple[list[float], float]:
        ttft_s = request.slo_ttft_s or self._slo_ttft_s
        tpot_s = request.slo_tpot_s or self._slo_tpot_s
        mean_urgency = self.mean_urgency
        costs = []
        for prediction in predictions:
            attained = 1.0
            if ttft_s:
                attained = _attainment(prediction.ttft_s, ttft_s)
            if tpot_s:
                attained *= _attainment(prediction.step_s / prediction.tokens_per_step, tpot_s)
            urgency = _URGENCY * (1.0 - attained)
            mean_urgency = _KEEP * mean_urgency + (1.0 - _KEEP) * urgency
            own_s = prediction.ttft_s + prediction.decode_s
            costs.append((1.0 + urgency) * own_s + (1.0 + mean_urgency) * request.overuse * prediction.others_s)
        return costs, mean_urgency


def _attainment(expected_s: float, bound_s: float) -> float:
    """Return the probability of meeting a bound: a logistic function of the log ratio."""
    excess = math.log(expected_s / bound_s) / _SOFTNESS if expected_s > 0 else -50.0
    return 1.0 / (1.0 + math.exp(min(50.0, max(-50.0, excess))))
