"""What a routing decision is to minimise."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum

from policies.predict import Prediction
from policies.request import RequestFeatures


class Objective(StrEnum):
    """What counts: everybody's time to finish, to the first token, per token, or promises kept."""

    LATENCY = "latency"
    TTFT = "ttft"
    TPOT = "tpot"
    GOODPUT = "goodput"


Cost = Callable[[RequestFeatures, Prediction], float]
"""What a prediction costs, in seconds or what stands for them; less is better."""

_TIE_BREAK = 0.05
"""Weight of the time to finish where it is not what counts: between backends that are equal, the faster one."""

_BROKEN_S = 30.0
"""What a broken promise costs, in seconds of everybody's time."""

_SOFTNESS = 0.2
"""Standard error of a prediction, relative: near its bound a promise is half kept."""


def cost_of(objective: Objective, slo_ttft_s: float | None, slo_tpot_s: float | None) -> Cost:
    """Return the cost function of an objective.

    Parameters
    ----------
    slo_ttft_s, slo_tpot_s
        Bounds of requests that bring none, for `goodput`; None: no bound.
    """
    if objective is Objective.LATENCY:
        return lambda request, prediction: _everybody_s(prediction)
    if objective is Objective.TTFT:
        return lambda request, prediction: prediction.ttft_s + _TIE_BREAK * _everybody_s(prediction)
    if objective is Objective.TPOT:
        return lambda request, prediction: (
            prediction.decode_s + prediction.others_s + _TIE_BREAK * (prediction.ttft_s + prediction.others_s)
        )

    def goodput(request: RequestFeatures, prediction: Prediction) -> float:
        ttft_s = request.slo_ttft_s or slo_ttft_s
        tpot_s = request.slo_tpot_s or slo_tpot_s
        kept = 1.0
        broken = 0.0
        if ttft_s:
            kept = _kept(prediction.ttft_s, ttft_s)
        if tpot_s:
            step_s, per_step = prediction.step_s, prediction.tokens_per_step
            own = _kept(step_s / per_step, tpot_s)
            kept *= own
            # The others' steps become longer too. Theirs are taken to be like this one, in bound and in acceptance.
            broken = prediction.requests * (_kept((step_s - prediction.added_s) / per_step, tpot_s) - own)
        return _BROKEN_S * (1.0 - kept + broken) + _everybody_s(prediction)

    return goodput


def _everybody_s(prediction: Prediction) -> float:
    """Return what the request takes and what it takes from those already there."""
    return prediction.ttft_s + prediction.decode_s + prediction.others_s


def _kept(expected_s: float, bound_s: float) -> float:
    """Return the probability that a bound is kept, a logistic one in the logarithm."""
    off = math.log(expected_s / bound_s) / _SOFTNESS if expected_s > 0 else -50.0
    return 1.0 / (1.0 + math.exp(min(50.0, max(-50.0, off))))
