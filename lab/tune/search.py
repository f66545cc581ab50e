"""Searches for better numbers in rules.

References
----------
Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011 (the tree-structured Parzen estimator).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import create_trial

from policies.rules.policy import ThresholdSettings

_BATCH = 4  # settings proposed together; independent of the number of cores
_FACTOR = 8.0  # range of counts and weights, up and down
_SHARE = (0.0, 1.0)
_RANGES = {"temperature": (0.0, 2.0), "top_p": _SHARE, "overlap": _SHARE, "code_share": _SHARE}
_RANGES |= {"slack": (0.0, 64.0), "ratio": (1.0, 4.0)}
_COMPARISON = re.compile(r"([<>]=?) (\S+)")

ScoreAll = Callable[[Sequence[ThresholdSettings]], Sequence[float]]
"""Plays settings and returns the score to minimize for each; infinite for unacceptable ones."""


def search(score_all: ScoreAll, present: ThresholdSettings, trials: int, seed: int) -> ThresholdSettings:
    """Return the best settings of `trials` trials, or the current ones; numbers that do not help stay unchanged."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    [least], best, known = score_all([present]), present, numbers(present)
    ranges: dict[str, BaseDistribution] = {place: _range(place, value) for place, value in known.items()}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.add_trial(create_trial(params=known, distributions=ranges, value=least))
    for begun in range(0, trials, _BATCH):
        batch = [study.ask(ranges) for _ in range(min(_BATCH, trials - begun))]
        tried = [with_numbers(present, {name: float(f"{at:.2g}") for name, at in one.params.items()}) for one in batch]
        scores = iter(score_all([one for one in tried if one is not None]))
        for trial, settings in zip(batch, tried, strict=True):
            score = math.inf if settings is None else next(scores)
            study.tell(trial, score)
            if settings is not None and score < least:
                best, least = settings, score
    for place, value in known.items():
        if numbers(best)[place] != value and (back := with_numbers(best, {place: value})) is not None:
            [score] = score_all([back])
            best, least = (back, score) if score <= least else (best, least)
    return best


def _range(place: str, value: float) -> FloatDistribution:
    for key in place.split("."):
        if key in _RANGES:
            return FloatDistribution(min(_RANGES[key][0], value), max(_RANGES[key][1], value))
    least, most = sorted((value / _FACTOR, value * _FACTOR))
    return FloatDistribution(least, most, log=value > 0)


def numbers(settings: ThresholdSettings) -> dict[str, float]:
    """Return the tunable numbers by place: bounds except exact numbers, weights, slacks and spill.

    Examples
    --------
    >>> rules = [{"name": "copies", "when": {"overlap": ">= 0.5", "n": 1}, "prefer": ["suffix"]}]
    >>> numbers(ThresholdSettings.model_validate({"rules": rules}))
    {'.spill.slack': 8.0, '.spill.ratio': 1.25, '.rules.0.when.overlap.>=': 0.5}
    """
    found: dict[str, float] = {}
    _moved(rules_document(settings), found.setdefault)
    return found


def with_numbers(settings: ThresholdSettings, values: Mapping[str, float]) -> ThresholdSettings | None:
    """Return the rules with other numbers in some places; None if a condition could then never hold."""
    others = settings.model_dump(exclude={"rules", "spill"})
    moved = _moved(rules_document(settings), values.get)
    try:
        return ThresholdSettings.model_validate({**others, **moved})
    except ValueError:
        return None


def rules_document(settings: ThresholdSettings) -> dict[str, Any]:
    """Return rules and spill as in a pool file."""
    rules = [rule.model_dump(mode="json", exclude_defaults=True) for rule in settings.rules]
    return {"spill": settings.spill.model_dump(), "rules": rules}


def _moved(node: Any, move: Callable[[str, float], float], place: str = "") -> Any:
    """Return part of a document with each number, also in comparisons, replaced by `move(place, number)`."""
    if isinstance(node, dict):
        return {key: _moved(value, move, f"{place}.{key}") for key, value in node.items()}
    if isinstance(node, list):
        return [_moved(value, move, f"{place}.{index}") for index, value in enumerate(node)]
    if isinstance(node, float):
        return move(place, node)
    if isinstance(node, str):
        return _COMPARISON.sub(lambda one: f"{one[1]} {move(f'{place}.{one[1]}', float(one[2])):.12g}", node)
    return node
