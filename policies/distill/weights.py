"""The weights of a rule that come nearest to the costs of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from policies.distill.fluid_choice import Situations
from policies.distill.tree import Places, mean_costs

_MOST_SLACK = 1000.0
"""Where requests there hardly cost anything: no pool has that many."""

_DIGITS = 2


class Weighed(NamedTuple):
    """What a rule says, and what it is made of.

    Parameters
    ----------
    weights
        Of each target, the best first, whose weight is 1.
    slack
        Requests that make a backend as dear again as it is when idle, but for one, which every score counts.
    idle_s
        Cost on an idle backend of each target, in the same order, in seconds.
    """

    weights: dict[str, float]
    slack: float
    idle_s: dict[str, float]


def weighed(situations: Situations, places: Places, targets: Mapping[str, Sequence[int]]) -> Weighed:
    """Return the weights by which (requests + 1 + slack) / weight comes nearest to the mean costs of some situations.

    Costs are a line in the requests there, with an intercept and a slope for each backend; a rule has one slack for
    all. It is the median of intercept / slope. Given that, the weights fit the lines by least squares where there were
    requests.

    Parameters
    ----------
    targets
        Places of the backends of each.
    """
    idle_s, each_s = mean_costs(situations, places)
    requests, weights = situations.requests[places], situations.weights[places]
    slack = float(np.clip(np.median(idle_s / np.maximum(each_s, 1e-12)), 1.0, _MOST_SLACK))
    scale, idle = {}, {}
    for target, members in targets.items():
        idle[target] = float(idle_s[list(members)].mean())
        up = down = 0.0
        for place in members:
            line = idle_s[place] + each_s[place] * requests[:, place]
            score = requests[:, place] + slack
            up += float((weights * line * score).sum())
            down += float((weights * score**2).sum())
        scale[target] = up / down
    order = sorted(scale, key=scale.__getitem__)
    best = scale[order[0]]
    return Weighed(
        {target: max(10.0**-_DIGITS, round(best / scale[target], _DIGITS)) for target in order},
        slack - 1.0,
        {target: idle[target] for target in order},
    )
