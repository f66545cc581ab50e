"""Rule: the comparison of two methods that is worth most, given what is unknown about them.

Which of two drafting methods a pool needs depends on its engines, its traffic and its load. What was learned about each
replica gives an expectation and its error; only serving both decides.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import permutations
from typing import Final

import numpy as np

from gateway.rooms.advice.evidence import BackendEvidence, ModelEvidence, Steps
from gateway.rooms.advice.finding import OF, Finding, Floats, Gain, gain_of, relative_time
from policies.learned.belief import SPREAD

LEAST_WORTH: Final = 0.01
"""Share of the total answer time that a comparison must be expected to save."""
_MIN_ANSWERS: Final = 20.0
_NOISE: Final = 0.15
"""Relative standard deviation of an answer's mean step time around the fit."""
_MODEL: Final = 0.1
"""Relative standard deviation of the step time at another backend's load, and of the time per token on its texts."""
_DRAWS: Final = 2000


def experiment(model: ModelEvidence) -> list[Finding]:
    """Return the comparison that saves most on average, if the better arm is adopted afterwards."""
    if find_spec("gateway.rooms.compare") is None:
        return []
    known = [
        (backend, backend.steps)
        for backend in model.backends
        if backend.steps is not None and not backend.is_silent and backend.steps.answers >= _MIN_ANSWERS
    ]
    total = sum(steps.answers for _, steps in known)
    found = [
        (float(np.mean(np.maximum(draws, 0.0))) * steps.answers / total, one, other, draws)
        for (one, steps), (other, others) in permutations(known, 2)
        if one.method is not other.method
        and frozenset((one.method.value, other.method.value)) not in model.compared
        and (draws := _saved(model, one, steps, other, others)) is not None
    ]
    worth, one, other, draws = max(found, key=lambda each: each[0], default=(0.0, None, None, None))
    if one is None or other is None or draws is None or worth < LEAST_WORTH:
        return []
    gain = gain_of(draws, OF)
    title = f"find out whether {other.method} would serve its requests sooner than {one.method}"
    evidence = (
        f"{-gain.share:+.0%} time expected ({gain.confidence:.0%}: {-gain.high:+.0%} to {-gain.low:+.0%}), by step "
        "times of both as learned"
    )
    saves = f"{worth:.1%} of the time of all answers in the mean, if the better of both is taken afterwards"
    saves += f"; meanwhile the answers of both take at most {_lost(model, one, other, gain):.1%} longer"
    change = f"gateway compare start --model {model.name} --a {one.method} --b {other.method} --for 1h"
    return [Finding("experiment", model.name, one.name, title, None, evidence, change, saves)]


def _lost(model: ModelEvidence, one: BackendEvidence, other: BackendEvidence, gain: Gain) -> float:
    """Return how much longer answers may take during the comparison, by the lower and the upper end of the gain.

    Each arm gets requests in proportion to its replicas, however slow it is; that is more than the slower one gets now.
    """
    members = [[each.name for each in model.backends if each.method is arm.method] for arm in (one, other)]
    now = [sum(kind.tokens * kind.sent.get(name, 0.0) for kind in model.kinds for name in names) for names in members]
    more = len(members[1]) / sum(map(len, members)) - now[1] / sum(now)  # share of requests for the other arm
    return max(more * -gain.low, -more * gain.high / (1.0 - gain.high), 0.0)


def _saved(
    model: ModelEvidence, one: BackendEvidence, steps: Steps, other: BackendEvidence, others: Steps
) -> Floats | None:
    """Return draws of the share of time that another method would save on the requests of a backend."""
    kinds = [kind for kind in model.kinds if {one.name, other.name} <= kind.tokens_per_step.keys()]
    tokens = np.array([kind.tokens * kind.sent.get(one.name, 0.0) for kind in kinds])
    if not tokens.sum():
        return None
    own, theirs = (np.array([kind.tokens_per_step[each.name] for kind in kinds]) for each in (one, other))
    more = float((tokens / theirs).sum() / (tokens / own).sum())
    answers = np.array([steps.answers, others.answers, max(1.0, one.answers), max(1.0, other.answers)])
    variance = _MODEL**2 + float((np.array([_NOISE, _NOISE, SPREAD, SPREAD]) ** 2 / answers).sum())
    error = np.exp(np.sqrt(variance) * np.random.default_rng(0).standard_normal(_DRAWS))
    row = np.array(others.cost)
    return 1.0 - relative_time(steps.load, steps.fitted_s, lambda load: row @ load * error, np.full(_DRAWS, more))
