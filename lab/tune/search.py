"""Search for better numbers in rules, on windows of a trace.

A window is a run of consecutive requests, so it has the rate and the bursts of the trace; the windows are spread evenly
over the tuning part. Settings are proposed by a tree-structured Parzen estimator that begins with the present ones, and
pruned by successive halving: about a third of those that were simulated on two windows go on to six, and a third of
these to all eighteen.

References
----------
Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011; Li et al., "A System for Massively
Parallel Hyperparameter Tuning", MLSys 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from backends.draft_schedule import draft_tokens
from backends.speculation import Method
from lab.options.policy import with_seed
from lab.replay.request import ReplayRequest
from lab.replay.simulate import Replayed, ReplicaSpec, replay
from lab.replay.table import RequestTable
from lab.tune.knobs import Knob, Scoring, knobs, rounded, with_values
from policies.build import build
from policies.policy import PolicySettings
from policies.rules.policy import ThresholdSettings

RUNGS = (2, 6, 18)
"""Windows on which settings have been simulated when they are judged."""

MIN_WINDOW_REQUESTS = 1000
"""Minimum requests per window; a part shorter than all windows of this size is simulated as a whole."""

_REDUCTION = 3  # about one of this many settings goes on to the next rung
_LEAD = 0.1  # share of a window that is simulated but not counted, so that the pool is not idle
_BATCH, _BATCH_WHOLE = 9, 4  # settings proposed together; independent of the number of cores
_NUMBERS = 10  # seldom more; each takes all windows to see whether it helped
_MOST_CACHED = 50_000  # requests


class Window(NamedTuple):
    """The requests from `start` to `stop`, of which the first `lead` are not counted.

    A replication above 0 is other traffic like them (`RequestTable.resampled`).
    """

    start: int
    stop: int
    lead: int = 0
    replication: int = 0


class Task(NamedTuple):
    """A policy to simulate on a window."""

    policy: str
    settings: PolicySettings
    window: Window


PlayAll = Callable[[Sequence[Task]], Sequence[Replayed]]
"""Runs tasks in parallel, and returns their results in the same order."""


class WindowRunner:
    """Runs tasks; sent once to every process. Keeps what n-gram and suffix drafting does in some of the windows."""

    def __init__(self, pool: Sequence[ReplicaSpec], requests: Sequence[ReplayRequest], seed: int) -> None:
        self._pool, self._requests, self._seed = pool, requests, seed
        self._cached: dict[Window, list[ReplayRequest]] = {}
        self._free = _MOST_CACHED

    def __call__(self, task: Task) -> Replayed:
        """Run one task; a policy without a seed gets that of the runner."""
        policy = build(task.policy, with_seed(task.settings, self._seed))
        seed, window = self._seed + task.window.replication, task.window
        return replay(self._pool, self._of(window), policy, seed=seed, warmup=window.lead)

    def _of(self, window: Window) -> Sequence[ReplayRequest]:
        if window in self._cached:
            return self._cached[window]
        requests = self._requests[window.start : window.stop]
        if window.replication:
            assert isinstance(requests, RequestTable)  # as of a trace
            return requests.resampled(window.replication)
        if len(requests) > self._free:
            return requests
        speculating = [
            (one.method, draft_tokens(one.method, one.config), one.config)
            for one in self._pool
            if one.method is not Method.BASELINE
        ]
        prepared = list(requests)
        for request in prepared:
            if request.acceptance or request.text is not None:
                request.precompute_steps(speculating)
        self._free -= len(prepared)
        self._cached[window] = prepared
        return prepared


def windows_of(requests: int, trials: int, budget: int) -> list[Window]:
    """Return the windows of the first `requests` requests, in the order in which they are simulated.

    Examples
    --------
    >>> [len(windows_of(requests, trials=100, budget=1_500_000)) for requests in (17_999, 100_000)]
    [1, 18]
    """
    count = RUNGS[-1]
    if requests < count * MIN_WINDOW_REQUESTS:
        return [Window(0, requests)]
    new = [RUNGS[0], *(after - before for before, after in pairwise(RUNGS))]
    plays = trials * sum(windows / _REDUCTION**rung for rung, windows in enumerate(new)) + _NUMBERS * count
    each = min(requests // count, max(MIN_WINDOW_REQUESTS, int(budget / plays)))
    part = requests / count
    starts = [int(part * index + (part - each) / 2) for index in range(count)]  # in the middle of equal parts
    steps = [count // windows for windows in RUNGS]
    order = dict.fromkeys(index for step in steps for index in range(step // 2, count, step))  # each rung spread evenly
    return [Window(starts[index], starts[index] + each, int(_LEAD * each)) for index in order]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    settings: ThresholdSettings  # best settings; the present ones if none is better
    asked: int  # number of settings proposed: all trials, unless the budget ended first
    # Number of settings simulated on each rung, without those that left more requests unserved than the present ones.
    trials: tuple[int, ...]


class Search:
    """Searches from the present rules; settings that leave more requests unserved than these are rejected."""

    def __init__(
        self, play_all: PlayAll, scoring: Scoring, windows: Sequence[Window], present: ThresholdSettings, budget: int
    ) -> None:
        self._play_all, self._scoring, self._windows = play_all, scoring, windows
        is_whole = len(windows) == 1
        self._rungs = (1,) if is_whole else RUNGS
        self._batch = _BATCH_WHOLE if is_whole else _BATCH
        self._left = budget  # requests that may still be simulated
        self._counts = [0] * len(self._rungs)
        self._present = _Candidate(present)

    def run(self, trials: int, seed: int) -> SearchResult:
        """Search among so many settings."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        present, whole = self._present, [self._present]
        movable = knobs(present.settings)
        scales: dict[str, BaseDistribution] = {
            knob.name: FloatDistribution(knob.least, knob.most, log=knob.whole) for knob in movable
        }
        known = {knob.name: knob.present for knob in movable}
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed),
            pruner=optuna.pruners.SuccessiveHalvingPruner(self._rungs[0], _REDUCTION),
        )
        self._play([present], len(self._windows))
        study.add_trial(create_trial(params=known, distributions=scales, value=self._score(present)))
        asked = 0
        while asked < trials and self._left > 0:
            batch = [study.ask(scales) for _ in range(min(self._batch, trials - asked))]
            asked += len(batch)
            whole += self._tried(study, batch, movable)
        best = self._settled(min(whole, key=self._score))
        return SearchResult(best.settings, asked, tuple(self._counts))

    def _tried(self, study: optuna.Study, batch: Sequence[optuna.Trial], movable: Sequence[Knob]) -> list[_Candidate]:
        """Simulate settings until they are pruned, and return those that were simulated on all windows."""
        proposed = {trial: _settings(self._present.settings, trial.params, movable) for trial in batch}
        left = {trial: _Candidate(settings) for trial, settings in proposed.items() if settings is not None}
        for rung, windows in enumerate(self._rungs):
            self._play(list(left.values()), windows)
            left = {trial: one for trial, one in left.items() if one.errors <= self._present.errors_on(windows)}
            self._counts[rung] += len(left)
            for trial, one in left.items():
                trial.report(self._score(one), windows)
            if windows < self._rungs[-1]:
                left = {trial: one for trial, one in left.items() if not trial.should_prune()}
        for trial in batch:
            if trial in left:
                study.tell(trial, self._score(left[trial]))
            else:
                study.tell(trial, state=TrialState.PRUNED)
        return list(left.values())

    def _settled(self, best: _Candidate) -> _Candidate:
        """Reset each number that did not help, as the search moves numbers without influence on the trace at random."""
        values = {knob.name: knob.present for knob in knobs(best.settings)}
        for knob in knobs(self._present.settings):
            if values[knob.name] == knob.present:
                continue
            try:
                one = _Candidate(with_values(best.settings, {knob.name: knob.present}))
            except ValueError:  # a condition can then never hold
                continue
            self._play([one], len(self._windows))
            if self._score(one) <= self._score(best) and one.errors <= self._present.errors:
                best = one
        return best

    def _play(self, tried: Sequence[_Candidate], windows: int) -> None:
        """Simulate settings on all of the first windows that they have not been simulated on."""
        tasks = {
            (number, window): Task("thresholds", one.settings, window)
            for number, one in enumerate(tried)
            for window in self._windows[len(one.played) : windows]
        }
        self._left -= sum(window.stop - window.start for _, window in tasks)
        for (number, _), played in zip(tasks, self._play_all(list(tasks.values())), strict=True):
            tried[number].played.append(played)

    def _score(self, one: _Candidate) -> float:
        return self._scoring(one.played)


@dataclass(slots=True)
class _Candidate:
    """Settings, and their results in the order of the windows."""

    settings: ThresholdSettings
    played: list[Replayed] = field(default_factory=list)

    @property
    def errors(self) -> int:
        return self.errors_on(len(self.played))

    def errors_on(self, windows: int) -> int:
        return sum(one.errors for one in self.played[:windows])


def _settings(
    present: ThresholdSettings, params: Mapping[str, float], movable: Sequence[Knob]
) -> ThresholdSettings | None:
    """Return the present rules with other numbers; None if a condition can then never hold."""
    values = {knob.name: rounded(params[knob.name], knob) for knob in movable}
    for name, low in values.items():
        high = values.get(other := name.removesuffix(".low") + ".high")
        if name.endswith(".low") and high is not None and low > high:  # swap, since an empty range would waste a trial
            values |= {name: high, other: low}
    try:
        return with_values(present, values)
    except ValueError:  # includes pydantic's ValidationError
        return None
