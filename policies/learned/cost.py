"""What a routing decision is to minimise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

from policies.features.request import RequestFeatures
from policies.learned.predict import Prediction
from policies.learned.settings import Objective


class Cost(ABC):
    """What a prediction costs. A class and no function: compiled, its method is called without a detour."""

    @abstractmethod
    def of(self, request: RequestFeatures, prediction: Prediction) -> float:
        """Return the cost of a request on a backend, in seconds or what stands for them; less is better."""

    def dry_run_copy(self) -> Cost:
        """Return one that costs the same, and remembers nothing here of what it is asked."""
        return self


_TIE_BREAK: Final = 0.05
"""Weight of the time to finish where it is not what counts: between backends that are equal, the faster one."""

_URGENCY: Final = 2.0
"""How much more a second counts of a request whose promise is as good as broken, than of one without any."""

_SOFTNESS: Final = 0.6
"""Standard error of a prediction, relative: near its bound a promise is half kept. Answers differ by that much in what
they take from the same step, and the load changes while they run."""

_KEEP: Final = 0.998
"""Per prediction, of the mean urgency: the last hundred requests count, on four candidates."""


def cost_of(objective: Objective, slo_ttft_s: float | None, slo_tpot_s: float | None) -> Cost:
    """Return the cost of an objective.

    Parameters
    ----------
    slo_ttft_s, slo_tpot_s
        Bounds of requests that bring none, for `goodput`; None: no bound.
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
        return _everybody_s(prediction)


class _Ttft(Cost):
    def of(self, request: RequestFeatures, prediction: Prediction) -> float:
        return prediction.ttft_s + _TIE_BREAK * _everybody_s(prediction)


class _Tpot(Cost):
    def of(self, request: RequestFeatures, prediction: Prediction) -> float:
        others_s = prediction.others_s
        return prediction.decode_s + others_s + _TIE_BREAK * (prediction.ttft_s + others_s)


class _Goodput(Cost):
    """Everybody's time, of which a second counts for more where a promise is in danger.

    A penalty for each promise that is expected to be broken keeps fewer of them: it is paid at once, and what a request
    takes from those already there, and from those who come while it stays, is spread over all its time. So time stays
    what is counted. A request's own counts by how urgent it is itself, and the others' by the mean urgency; where all
    have the same bounds, that comes to `latency` again. docs/routing.md has the figures.
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
        kept = 1.0
        if ttft_s:
            kept = _kept(prediction.ttft_s, ttft_s)
        if tpot_s:
            kept *= _kept(prediction.step_s / prediction.tokens_per_step, tpot_s)
        urgency = _URGENCY * (1.0 - kept)
        self._mean_urgency = _KEEP * self._mean_urgency + (1.0 - _KEEP) * urgency
        own_s = prediction.ttft_s + prediction.decode_s
        return (1.0 + urgency) * own_s + (1.0 + self._mean_urgency) * prediction.others_s


def _everybody_s(prediction: Prediction) -> float:
    """Return what the request takes and what it takes from those already there."""
    return prediction.ttft_s + prediction.decode_s + prediction.others_s


def _kept(expected_s: float, bound_s: float) -> float:
    """Return the probability that a bound is kept, a logistic one in the logarithm."""
    off = math.log(expected_s / bound_s) / _SOFTNESS if expected_s > 0 else -50.0
    return 1.0 / (1.0 + math.exp(min(50.0, max(-50.0, off))))
