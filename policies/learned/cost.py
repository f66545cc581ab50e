"""The cost that a routing decision minimises."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

from policies.features.request import RequestFeatures
from policies.learned.predict import Prediction
from policies.learned.settings import Objective


class Cost(ABC):
    """The cost of a prediction; a class, because mypyc calls a method faster than a function object."""

    @abstractmethod
    def of(self, request: RequestFeatures, prediction: Prediction) -> float:
        """Return the cost of a request on a backend, in seconds or weighted seconds; lower is better."""

    def dry_run_copy(self) -> Cost:
        """Return a copy whose calls do not affect this cost."""
        return self


_TIE_BREAK: Final = 0.05
"""Weight of the total delay for an objective other than latency, so that ties go to the faster backend."""

_URGENCY: Final = 2.0
"""Additional weight of a second if the request is sure to miss its SLO."""

_SOFTNESS: Final = 0.6
"""Scale of a prediction's relative error: answers differ in acceptance, and the load changes while they run."""

_KEEP: Final = 0.998
"""Decay of the mean urgency per prediction; with four candidates, about the last hundred requests count."""


def cost_of(objective: Objective, slo_ttft_s: float | None, slo_tpot_s: float | None) -> Cost:
    """Return the cost function of an objective.

    Parameters
    ----------
    slo_ttft_s, slo_tpot_s
        Default SLO for `goodput`, in seconds to the first token and per output token; None for no bound.

    Examples
    --------
    >>> from policies.features.request import ANY_REQUEST
    >>> prediction = Prediction(0.1, 2.0, 0.5, 0.02, 100.0, 2.0, 200.0, 300.0, 200.0, 3)
    >>> cost_of(Objective.LATENCY, None, None).of(ANY_REQUEST, prediction)
    2.6
    """
    if objective is Objective.LATENCY:
        return _Latency()
    if objective is Objective.TTFT:
        return _Ttft()
    if objective is Objective.TPOT:
        return _Tpot()
    return _Goodput(slo_ttft_s, slo_tpot_s)


class _Latency(Cost):
    def of(self, request: RequestFeatures, prediction: Prediction) -> float:
        return _total_s(prediction)


class _Ttft(Cost):
    def of(self, request: RequestFeatures, prediction: Prediction) -> float:
        return prediction.ttft_s + _TIE_BREAK * _total_s(prediction)


class _Tpot(Cost):
    def of(self, request: RequestFeatures, prediction: Prediction) -> float:
        others_s = prediction.others_s
        return prediction.decode_s + others_s + _TIE_BREAK * (prediction.ttft_s + others_s)


class _Goodput(Cost):
    """The total delay, in which a second weighs more if an SLO is at risk.

    The request's own time is weighted by its urgency, and the time that it takes from others by the mean urgency; if
    all requests have the same bounds, this equals `latency`. A fixed penalty for each expected miss meets fewer SLOs,
    because it ignores that a request slows others for as long as it runs. docs/routing.md has the figures.
    """

    def __init__(self, slo_ttft_s: float | None, slo_tpot_s: float | None) -> None:
        self._slo_ttft_s = slo_ttft_s
        self._slo_tpot_s = slo_tpot_s
        self._mean_urgency = 0.0

    def dry_run_copy(self) -> Cost:
        other = _Goodput(self._slo_ttft_s, self._slo_tpot_s)
        other._mean_urgency = self._mean_urgency
        return other

    def of(self, request: RequestFeatures, prediction: Prediction) -> float:
        ttft_s = request.slo_ttft_s or self._slo_ttft_s
        tpot_s = request.slo_tpot_s or self._slo_tpot_s
        attained = 1.0
        if ttft_s:
            attained = _attainment(prediction.ttft_s, ttft_s)
        if tpot_s:
            attained *= _attainment(prediction.step_s / prediction.tokens_per_step, tpot_s)
        urgency = _URGENCY * (1.0 - attained)
        self._mean_urgency = _KEEP * self._mean_urgency + (1.0 - _KEEP) * urgency
        own_s = prediction.ttft_s + prediction.decode_s
        return (1.0 + urgency) * own_s + (1.0 + self._mean_urgency) * prediction.others_s


def _total_s(prediction: Prediction) -> float:
    """Return the request's own time plus the delay that it causes to the requests already there, in seconds."""
    return prediction.ttft_s + prediction.decode_s + prediction.others_s


def _attainment(expected_s: float, bound_s: float) -> float:
    """Return the probability of meeting a bound: a logistic function of the log ratio."""
    excess = math.log(expected_s / bound_s) / _SOFTNESS if expected_s > 0 else -50.0
    return 1.0 / (1.0 + math.exp(min(50.0, max(-50.0, excess))))
