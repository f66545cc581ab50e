"""How strongly counts indicate that requests fail more often in one place than elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

_SHARES: Final = (0.02, 0.05, 0.15, 0.4, 0.8)
"""Alternative shares of failures; the evidence is the mean over them."""
_FLOOR: Final = 0.005
"""Assumed share of requests that fail anywhere, before anything is known."""
_PRIOR_TRIES: Final = 50.0
_MOST_OF_ONE: Final = 0.6
"""Largest share of the counted tries from one client."""


def null_share(bad: float, tries: float) -> float:
    """Return a high estimate of the share of failures, given `bad` in `tries`: the mean plus two deviations.

    Examples
    --------
    >>> round(null_share(0, 0), 3), round(null_share(0, 10_000), 4), round(null_share(100, 1000), 3)
    (0.025, 0.0001, 0.114)
    """
    share = (bad + _FLOOR * _PRIOR_TRIES) / (tries + _PRIOR_TRIES)
    return share + 2.0 * math.sqrt(share * (1.0 - share) / (tries + _PRIOR_TRIES))


def log_evidence(bad: float, tries: float, null: float) -> float:
    """Return the logarithm of the evidence that more than the share `null` of the tries fails.

    It is the mean likelihood ratio of some shares above `null`: under `null`, it ever exceeds x with a probability of
    at most 1/x, however often one looks (Ville's inequality).

    Examples
    --------
    >>> round(log_evidence(7, 42, 0.01), 1), log_evidence(0, 42, 0.01) < 0
    (12.0, True)
    """
    ratios = [
        bad * math.log(share / null) + (tries - bad) * math.log((1.0 - share) / (1.0 - null))
        for share in _SHARES
        if share > null
    ]
    if not ratios:
        return -math.inf
    most = max(ratios)
    return most + math.log(sum(math.exp(ratio - most) for ratio in ratios) / len(_SHARES))


def weights_of(tries: Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each client's requests, by its tries: no client should dominate all others.

    Examples
    --------
    >>> weights_of({"a": 60.0, "b": 20.0}), weights_of({"a": 95.0})
    ({'a': 0.5, 'b': 1.0}, {'a': 0.0})
    """
    total = sum(tries.values())
    weights = {}
    for client, own in tries.items():
        most = _MOST_OF_ONE * (total - own) / (1.0 - _MOST_OF_ONE)
        weights[client] = 1.0 if own <= most else most / own
    return weights
