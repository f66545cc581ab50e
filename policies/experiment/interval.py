"""Intervals that hold at any time, however often one looks."""

from __future__ import annotations

import math
from typing import Final

EFFECT: Final = 0.2
"""Relative difference for which they are tuned."""


def margin_at_any_time(variance: float, confidence: float, freedom: float = math.inf) -> float:
    """Return the half-width of an interval around an estimated difference that holds however often one looks.

    It contains the differences that a mixture sequential probability ratio test [1]_ does not reject, with a normal
    mixture of standard deviation `EFFECT`; if the variance is estimated, the t test of the same kind [2]_. With the
    variance V of the estimate, that of the mixture T, A = (V + T) / V, and v degrees of freedom, it is

        sqrt(V v (B - 1) / (1 - B / A)),    B = (A / (1 - confidence)^2)^(1 / (v + 1)),

    and infinite if B >= A: nothing is known yet.

    References
    ----------
    .. [1] Johari, Koomen, Pekelis and Walsh, "Always Valid Inference: Continuous Monitoring of A/B Tests", Operations
       Research 70(3), 2022.
    .. [2] Wang and Ramdas, "Anytime-Valid t-Tests and Confidence Sequences for Gaussian Means with Unknown Variance",
       Sequential Analysis 44(1), 2025.
    """
    if math.isinf(variance):
        return math.inf
    ratio = (variance + EFFECT**2) / variance
    bound = math.log(ratio) - 2.0 * math.log(1.0 - confidence)
    if math.isinf(freedom):
        return math.sqrt(variance * bound * ratio / (ratio - 1.0))
    grown = math.exp(bound / (freedom + 1.0))
    if grown >= ratio:
        return math.inf
    return math.sqrt(variance * freedom * (grown - 1.0) / (1.0 - grown / ratio))
