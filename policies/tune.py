"""The numbers in rules of `thresholds`, searched by replay on one part of a trace and judged on the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from policies.conditions import Bounds
from policies.intervals import Interval, block_length, block_sums, interval
from policies.policy import Policy, policies
from policies.replay import Replayed, ReplicaSpec, replay, slo_kept
from policies.replay_request import ReplayRequest
from policies.thresholds import ThresholdSettings

_SPANS = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "overlap": (0.0, 1.0), "code_share": (0.0, 1.0)}
_FACTOR = 8.0  # how far a number that counts something may move, up and down
_SLACK = (0.0, 64.0)
_WEIGHT_FACTOR = 2.0
_RATIO = (1.0, 4.0)
_DIGITS = 3  # of a number that was found: more would pretend to know

Values = Mapping[str, float]


class Goal(StrEnum):
    """What is to be made better: mean or p99 of the time to finish, or the share of requests that keep the SLO."""

    MEAN = "mean"
    P99 = "p99"
    GOODPUT = "goodput"


@dataclass(frozen=True, slots=True)
class Knob:
    """A number in the rules that may be moved.

    Parameters
    ----------
    name
        Of the bound as `rule.feature.low` or `rule.feature.high`; `rule.slack`, `rule.weights.target`; or
        `spill.slack`, `spill.ratio`.
    present
        Within `least` and `most`, the ends of what is searched.
    whole
        It counts something, and is searched on the scale of its logarithm.
    """

    name: str
    present: float
    least: float
    most: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """What settings came to on one part of a trace; of `score` less is better: seconds, or a share."""

    played: Replayed
    score: float


def knobs(settings: ThresholdSettings) -> list[Knob]:
    """Return the numbers of rules that may be moved: bounds, but for exact numbers and for counts at 0."""
    found = []
    for rule in settings.rules:
        for feature, condition in rule.when.conditions().items():
            if not isinstance(condition, Bounds) or condition.low == condition.high:
                continue
            for end in ("low", "high"):
                present = getattr(condition, end)
                if not math.isfinite(present):
                    continue
                name = f"{rule.name}.{feature}.{end}"
                if feature in _SPANS:
                    least, most = _SPANS[feature]
                    found.append(Knob(name, present, min(least, present), max(most, present)))
                elif present >= 1:
                    found.append(Knob(name, present, max(1.0, present / _FACTOR), present * _FACTOR, whole=True))
        found += [
            Knob(f"{rule.name}.weights.{target}", weight, weight / _WEIGHT_FACTOR, weight * _WEIGHT_FACTOR)
            for target, weight in rule.weights.items()
        ]
        if rule.slack is not None:
            found.append(Knob(f"{rule.name}.slack", rule.slack, _SLACK[0], max(_SLACK[1], 2 * rule.slack)))
    slack, ratio = settings.spill.slack, settings.spill.ratio
    found.append(Knob("spill.slack", slack, _SLACK[0], max(_SLACK[1], slack)))
    found.append(Knob("spill.ratio", ratio, _RATIO[0], max(_RATIO[1], ratio)))
    return found


def with_values(settings: ThresholdSettings, values: Values) -> ThresholdSettings:
    """Return the rules with other numbers.

    Raises
    ------
    ValueError
        If a condition could never hold then.
    """
    rules = []
    for rule in settings.rules:
        when: dict[str, object] = {}
        for feature, condition in rule.when.conditions().items():
            moved: object = condition
            if isinstance(condition, Bounds):
                ends = {end: values.get(f"{rule.name}.{feature}.{end}", getattr(condition, end)) for end in _ENDS}
                moved = replace(condition, **ends)
                if moved.is_empty():
                    raise ValueError(f"rule '{rule.name}': {feature} can never hold")
            when[feature] = moved
        weights = {
            target: values.get(f"{rule.name}.weights.{target}", weight) for target, weight in rule.weights.items()
        }
        slack = values.get(f"{rule.name}.slack", rule.slack)
        targets: dict[str, object] = {"weights": weights} if weights else {"prefer": rule.prefer}
        rules.append({"name": rule.name, "when": when, "slack": slack, **targets})
    spill = {name: values.get(f"spill.{name}", getattr(settings.spill, name)) for name in ("slack", "ratio")}
    kept = settings.model_dump(exclude={"rules", "spill"})
    return ThresholdSettings.model_validate({**kept, "rules": rules, "spill": spill})


_ENDS = ("low", "high")


class Trial:
    """Plays settings on one part of a trace.

    Parameters
    ----------
    slo
        As `slo_kept` takes it; for `Goal.GOODPUT`.
    """

    def __init__(
        self,
        pool: Sequence[ReplicaSpec],
        requests: Sequence[ReplayRequest],
        goal: Goal,
        slo: Mapping[str, float],
        seed: int,
    ) -> None:
        self._pool, self._requests, self._goal, self._slo, self._seed = pool, requests, goal, slo, seed

    def rules(self, settings: ThresholdSettings) -> Judged:
        """Play with rules."""
        seeded = settings if settings.seed is not None else settings.model_copy(update={"seed": self._seed})
        return self.policy(policies()["thresholds"](seeded))

    def policy(self, policy: Policy) -> Judged:
        """Play with any policy."""
        played = replay(self._pool, self._requests, policy, seed=self._seed)
        return Judged(played, self._score(played))

    def _score(self, played: Replayed) -> float:
        if not len(played.e2e_s):
            return math.inf
        if self._goal is Goal.GOODPUT:
            return 1.0 - float(slo_kept(played, self._slo).sum()) / len(self._requests)
        return float(played.e2e_s.mean() if self._goal is Goal.MEAN else np.percentile(played.e2e_s, 99))


def search(
    trial: Trial,
    present: ThresholdSettings,
    trials: int,
    seed: int,
    progress: Callable[[float], None] | None = None,
) -> ThresholdSettings:
    """Search by a tree-structured Parzen estimator, from the present numbers on (Bergstra et al., NeurIPS 2011).

    Parameters
    ----------
    trials
        Settings to play, the present ones not counted.
    progress
        Called after each with the best score so far.

    Returns
    -------
    ThresholdSettings
        The best that were played, with each number put back that did not help; the present ones where none were better.
        Settings that leave more requests unserved
        than the present ones do not count.
    """
    import optuna  # loads for a third of a second, and this module is loaded with every policy

    movable = knobs(present)
    first = trial.rules(present)
    best, best_score = present, first.score
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    scales = {
        knob.name: optuna.distributions.FloatDistribution(knob.least, knob.most, log=knob.whole) for knob in movable
    }
    study.add_trial(
        optuna.trial.create_trial(
            params={knob.name: knob.present for knob in movable}, distributions=dict(scales), value=first.score
        )
    )
    for _ in range(trials):
        asked = study.ask(dict(scales))
        values = {knob.name: _rounded(asked.params[knob.name], knob) for knob in movable}
        try:
            settings = with_values(present, values)
        except ValueError:  # pydantic's too
            study.tell(asked, state=optuna.trial.TrialState.PRUNED)
        else:
            judged = trial.rules(settings)
            if judged.played.errors > first.played.errors:
                study.tell(asked, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(asked, judged.score)
                if judged.score < best_score:
                    best, best_score = settings, judged.score
        if progress is not None:
            progress(best_score)
    return _settled(trial, present, best, best_score)


def _settled(trial: Trial, present: ThresholdSettings, best: ThresholdSettings, best_score: float) -> ThresholdSettings:
    """Put back each number that did not help: of what a trace does not tell, a search would move numbers at random."""
    before = {knob.name: knob.present for knob in knobs(present)}
    values = {knob.name: knob.present for knob in knobs(best)}
    for name, value in before.items():
        if values[name] == value:
            continue
        try:
            settings = with_values(best, {name: value})
        except ValueError:
            continue
        judged = trial.rules(settings)
        if judged.score <= best_score:
            best, best_score = settings, judged.score
    return best


def _rounded(value: float, knob: Knob) -> float:
    rounded = float(f"{value:.{_DIGITS}g}")
    return float(round(rounded)) if knob.whole else rounded


def mean_ratio(tuned: Replayed, present: Replayed, seed: int) -> Interval | None:
    """Return mean time to finish over the present mean, on the same requests; None where they are too few to tell."""
    if len(tuned.e2e_s) != len(present.e2e_s):
        return None
    length = block_length(len(tuned.e2e_s))
    try:
        return interval([block_sums(tuned.e2e_s, length)], [block_sums(present.e2e_s, length)], seed)
    except ValueError:
        return None
