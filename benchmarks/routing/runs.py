"""Ratios of independent runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import geometric_mean, stdev

from scipy.stats import t


def of_runs(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the geometric mean, and half of its 95% interval as a share of it; NaN for one run.

    By Student's t on the logarithms.

    Examples
    --------
    >>> of_runs([0.9] * 8)
    (0.9, 0.0)
    """
    runs = len(ratios)
    error = stdev(map(math.log, ratios)) / math.sqrt(runs) if runs > 1 else math.nan
    return geometric_mean(ratios), float(t.ppf(0.975, runs - 1)) * error
