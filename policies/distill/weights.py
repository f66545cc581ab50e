"""The weights of a rule, fitted to the costs of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from policies.distill.fluid_choice import Floats, Situations
from policies.distill.tree import Indices, mean_costs

_MAX_SLACK = 1000.0
"""Upper limit of the slack, for requests whose cost hardly depends on the load."""

_DIGITS = 2


class RuleWeights(NamedTuple):
    """The fitted weights of a rule."""

    weights: dict[str, float]  # weight of each target, the best first with a weight of 1
    slack: float  # number of requests that double the cost on an idle backend, less the request itself
    idle_s: dict[str, float]  # cost on an idle backend of each target in seconds, in the same order


def chosen_by(weights: RuleWeights, requests: Floats, targets: Mapping[str, Sequence[int]]) -> Indices:
    """Return the index of the backend that a rule chooses at some loads, of shape (situations, backends)."""
    weight = np.empty(requests.shape[1])
    for target, members in targets.items():
        weight[list(members)] = weights.weights[target]
    chosen: Indices = ((requests + 1.0 + weights.slack) / weight).argmin(axis=1)
    return chosen


def fit_weights(situations: Situations, indices: Indices, targets: Mapping[str, Sequence[int]]) -> RuleWeights:
    """Return the weights for which (requests + 1 + slack) / weight fits the mean costs of some situations best.

    The mean cost of a backend is linear in its requests: idle cost + slope * requests. A rule has one slack for all
    backends, the median of idle cost / slope. Given the slack, the weights are a least-squares fit to those lines at
    the observed loads.
    """
    idle_s, each_s = mean_costs(situations, indices)
    requests, weights = situations.requests[indices], situations.weights[indices]
    slack = float(np.clip(np.median(idle_s / np.maximum(each_s, 1e-12)), 1.0, _MAX_SLACK))
    scale, idle = {}, {}
    for target, members in targets.items():
        idle[target] = float(idle_s[list(members)].mean())
        numerator = denominator = 0.0
        for backend in members:
            line = idle_s[backend] + each_s[backend] * requests[:, backend]
            score = requests[:, backend] + slack
            numerator += float((weights * line * score).sum())
            denominator += float((weights * score**2).sum())
        scale[target] = numerator / denominator
    order = sorted(scale, key=scale.__getitem__)
    best = scale[order[0]]
    return RuleWeights(
        {target: max(10.0**-_DIGITS, round(best / scale[target], _DIGITS)) for target in order},
        slack - 1.0,
        {target: idle[target] for target in order},
    )
