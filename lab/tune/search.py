"""Search for better numbers in rules by successive halving over windows of a trace.

A window is a run of consecutive requests, so it has the rate and the bursts of the trace; the windows are spread evenly
over the tuning part. Each of nine settings proposed together is simulated on two windows, the best three of them on
six, and the best of these on all eighteen. The final candidates are simulated on the whole part, or as much of it as
the budget allows.

References
----------
Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from backends.draft_schedule import draft_tokens
from backends.speculation import Method
from lab.replay.request import ReplayRequest
from lab.replay.simulate import Replayed, ReplicaSpec, replay
from lab.replay.table import RequestTable
from lab.tune.knobs import Knob, Scoring, knobs, rounded, with_values
from policies.build import build
from policies.policy import PolicySettings
from policies.rules.policy import ThresholdSettings

BUDGET = 6_000_000
"""Approximate number of requests to simulate before the final comparison: two minutes on two cores."""

WINDOWS = 18
RUNGS = (9, 3, 1)
"""Step between the windows simulated on each rung."""

MIN_WINDOW_REQUESTS = 1000
"""Minimum requests per window; a part shorter than `WINDOWS` such windows is simulated as a whole."""

FINALISTS = 3
_REDUCTION = 3  # one of this many settings is promoted to the next rung
_LEAD = 0.1  # share of a window that is simulated but not counted, so that the pool is not idle
_BATCH, _BATCH_WHOLE = 9, 4  # settings proposed together; independent of the number of cores
_CACHE_BYTES = 2**29


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
    """Runs tasks; sent once to every process. Caches the replay of n-gram and suffix drafting within a memory limit."""

    def __init__(self, pool: Sequence[ReplicaSpec], requests: Sequence[ReplayRequest], seed: int) -> None:
        self._pool, self._requests, self._seed = pool, requests, seed
        self._cached: dict[Window, list[ReplayRequest]] = {}
        self._free_bytes = _CACHE_BYTES

    def __call__(self, task: Task) -> Replayed:
        """Run one task; a policy without a seed gets that of the runner."""
        settings = task.settings
        if getattr(settings, "seed", 0) is None:
            settings = settings.model_copy(update={"seed": self._seed})
        policy = build(task.policy, settings)
        seed, window = self._seed + task.window.replication, task.window
        return replay(self._pool, self._of(window), policy, seed=seed, warmup=window.lead)

    def _of(self, window: Window) -> Sequence[ReplayRequest]:
        prepared = self._cached.get(window)
        if prepared is not None:
            return prepared
        requests = self._requests[window.start : window.stop]
        if window.replication:
            assert isinstance(requests, RequestTable)  # as of a trace
            return requests.resampled(window.replication)
        speculating = [
            (one.method, draft_tokens(one.method, one.config), one.config)
            for one in self._pool
            if one.method is not Method.BASELINE
        ]
        size = 1000 * len(requests)
        if size > self._free_bytes:
            return requests
        prepared = list(requests)
        for request in prepared:
            if request.acceptance or request.text is not None:
                size += 8 * request.output_tokens * len(speculating)
        if size > self._free_bytes:
            return requests
        for request in prepared:
            if request.acceptance or request.text is not None:
                request.precompute_steps(speculating)
        self._free_bytes -= size
        self._cached[window] = prepared
        return prepared


@dataclass(frozen=True, slots=True)
class Schedule:
    """The windows of the tuning part to simulate.

    Examples
    --------
    >>> schedule = Schedule.of(100_000, trials=100, budget=1_500_000)
    >>> len(schedule.windows), schedule.rungs[0]
    (18, (4, 13))
    """

    requests: int  # number of requests in the tuning part
    windows: tuple[Window, ...]  # windows in order; a single one for a short part
    rungs: tuple[tuple[int, ...], ...]  # indices of the windows that each rung adds

    @classmethod
    def of(cls, requests: int, trials: int, budget: int) -> Schedule:
        """Return a schedule for a number of trials within a budget of requests."""
        if requests < WINDOWS * MIN_WINDOW_REQUESTS:
            return cls(requests, (Window(0, requests),), ((0,),))
        # Each trial takes two windows, a third of them four more, and a ninth the other twelve; resetting a number
        # takes all windows, and there are seldom more than ten numbers.
        new = np.diff([0, *(WINDOWS // every for every in RUNGS)])
        plays = trials * float((new / _REDUCTION ** np.arange(len(RUNGS))).sum()) + 10 * WINDOWS
        each = min(requests // WINDOWS, max(MIN_WINDOW_REQUESTS, int(budget / plays)))
        used: set[int] = set()
        rungs = []
        for every in RUNGS:
            rungs.append(tuple(index for index in range(every // 2, WINDOWS, every) if index not in used))
            used.update(rungs[-1])
        return cls(requests, tuple(spread_windows(requests, each)), tuple(rungs))

    @property
    def played(self) -> int:
        """Number of requests in all windows."""
        return sum(window.stop - window.start for window in self.windows)


def spread_windows(requests: int, each: int) -> list[Window]:
    """Return windows of `each` requests, centered in equal parts."""
    part = requests / WINDOWS
    starts = [int(part * index + (part - each) / 2) for index in range(WINDOWS)]
    return [Window(start, start + each, int(_LEAD * each)) for start in starts]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    settings: ThresholdSettings  # best settings; the present ones if none is better
    asked: int  # number of settings proposed: all trials, unless the budget ended first
    # Number of settings simulated on each rung, without those that left more requests unserved than the present ones.
    trials: tuple[int, ...]
    schedule: Schedule  # windows of the search
    # Number of requests on which the finalists and the present rules were compared; 0 if trials used all requests.
    verified: int


class Search:
    """Searches with a tree-structured Parzen estimator, starting from the present numbers.

    Settings that leave more requests unserved than the present ones are rejected.

    References
    ----------
    Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011.
    """

    def __init__(
        self, play_all: PlayAll, scoring: Scoring, requests: int, trials: int, seed: int, budget: int = BUDGET
    ) -> None:
        self._play_all, self._scoring, self._seed = play_all, scoring, seed
        self.trials, self._budget = trials, budget // 2
        self.schedule = Schedule.of(requests, trials, self._budget)
        self._left = self._budget
        self._counts = [0] * len(self.schedule.rungs)
        self._batch = _BATCH if len(self.schedule.windows) > 1 else _BATCH_WHOLE

    def run(self, present: ThresholdSettings, progress: Callable[[float], None] | None = None) -> SearchResult:
        """Search from the present rules."""
        import optuna  # takes a third of a second to import

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        movable = knobs(present)
        scales = {
            knob.name: optuna.distributions.FloatDistribution(knob.least, knob.most, log=knob.whole) for knob in movable
        }
        self._present = _Trial(present)
        self._climb([self._present], everywhere=True)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._seed))
        known = {knob.name: knob.present for knob in movable}
        study.add_trial(
            optuna.trial.create_trial(params=known, distributions=dict(scales), value=self._present.scores[-1])
        )
        whole = [self._present]
        asked = 0
        while asked < self.trials and self._left > 0:
            trials = [study.ask(dict(scales)) for _ in range(min(self._batch, self.trials - asked))]
            asked += len(trials)
            tried = [_settings(present, trial.params, movable) for trial in trials]
            self._climb([one for one in tried if one is not None])
            for trial, one in zip(trials, tried, strict=True):
                if one is not None and one.whole:
                    study.tell(trial, one.scores[-1])
                    whole.append(one)
                else:
                    for rung, score in enumerate(one.scores if one is not None else ()):
                        trial.report(score, rung)
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                if progress is not None:
                    progress(min(other.scores[-1] for other in whole))
        counts = tuple(self._counts)
        best = self._settled(min(whole, key=lambda one: one.scores[-1]))
        if len(self.schedule.windows) == 1:
            return SearchResult(best.settings, asked, counts, self.schedule, 0)
        others = [one for one in sorted(whole, key=lambda one: one.scores[-1]) if one.settings != best.settings]
        finalists = [best, *others][:FINALISTS]
        settings, verified = self._verified([one.settings for one in finalists])
        return SearchResult(settings, asked, counts, self.schedule, verified)

    def _climb(self, tried: Sequence[_Trial], *, everywhere: bool = False) -> None:
        """Simulate settings rung by rung; the best third of each rung is promoted to the next."""
        left = list(tried)
        for rung, indices in enumerate(self.schedule.rungs):
            self._play(left, indices)
            for one in left:
                one.scores.append(self._scoring(one.played))
            if everywhere:
                continue
            left = [one for one in left if one.errors <= self._present.errors_on(len(one.played))]
            self._counts[rung] += len(left)
            if rung == len(self.schedule.rungs) - 1:
                for one in left:
                    one.whole = True
            left = sorted(left, key=lambda one: one.scores[-1])[: math.ceil(len(left) / _REDUCTION)]

    def _play(self, tried: Sequence[_Trial], indices: Sequence[int]) -> None:
        windows = [self.schedule.windows[index] for index in indices]
        answers = iter(self._run([(one.settings, window) for one in tried for window in windows]))
        for one in tried:
            one.played += [next(answers) for _ in windows]

    def _run(self, runs: Sequence[tuple[ThresholdSettings, Window]]) -> Sequence[Replayed]:
        self._left -= sum(window.stop - window.start for _, window in runs)
        return self._play_all([Task("thresholds", settings, window) for settings, window in runs])

    def _settled(self, best: _Trial) -> _Trial:
        """Reset each number that did not help, as the search moves numbers without influence on the trace at random."""
        before = {knob.name: knob.present for knob in knobs(self._present.settings)}
        values = {knob.name: knob.present for knob in knobs(best.settings)}
        for name, value in before.items():
            if values[name] == value:
                continue
            try:
                one = _Trial(with_values(best.settings, {name: value}))
            except ValueError:
                continue
            self._climb([one], everywhere=True)
            if one.scores[-1] <= best.scores[-1] and one.errors <= self._present.errors:
                best = one
        return best

    def _verified(self, finalists: Sequence[ThresholdSettings]) -> tuple[ThresholdSettings, int]:
        """Return the best of the finalists and the present settings on the whole part, and the requests per setting."""
        present = self._present.settings
        compared = [*(one for one in finalists if one != present), present]
        requests = self.schedule.requests
        each = self._budget // len(compared)
        if each >= requests:
            windows = [Window(0, requests)]
        else:
            windows = spread_windows(requests, max(each // WINDOWS, MIN_WINDOW_REQUESTS))
        answers = iter(self._run([(settings, window) for settings in compared for window in windows]))
        tried = [_Trial(settings, [next(answers) for _ in windows]) for settings in compared]
        least_errors = tried[-1].errors
        usable = [one for one in tried if one.errors <= least_errors]
        best = min(usable, key=lambda one: self._scoring(one.played))
        return best.settings, sum(window.stop - window.start for window in windows)


class _Trial:
    """Settings with their results in the order of the rungs, and the score after each rung."""

    def __init__(self, settings: ThresholdSettings, played: list[Replayed] | None = None) -> None:
        self.settings = settings
        self.played = played or []
        self.scores: list[float] = []
        self.whole = False

    @property
    def errors(self) -> int:
        return self.errors_on(len(self.played))

    def errors_on(self, windows: int) -> int:
        return sum(one.errors for one in self.played[:windows])


def _settings(present: ThresholdSettings, params: dict[str, float], movable: Sequence[Knob]) -> _Trial | None:
    """Return the present rules with other numbers; None if a condition can then never hold."""
    values = {knob.name: rounded(params[knob.name], knob) for knob in movable}
    for name, low in values.items():
        high = values.get(other := name.removesuffix(".low") + ".high")
        if name.endswith(".low") and high is not None and low > high:  # swap, since an empty range would waste a trial
            values |= {name: high, other: low}
    try:
        return _Trial(with_values(present, values))
    except ValueError:  # includes pydantic's ValidationError
        return None
