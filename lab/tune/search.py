"""The search for better numbers in rules: on pieces of a trace first, and only what does well there on more of it.

A piece is a window of requests that follow each other, so that it has the rate and the bursts of the trace; the windows
lie evenly over the part that is tuned on. Of nine settings that are proposed together each plays two of them, the best
three go on to six, and the best of those to all eighteen: successive halving (Jamieson and Talwalkar, AISTATS 2016).
What came out best at last plays the whole part, or as much of it as the budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from backends.calibration.parameters import draft_tokens
from backends.speculation import Method
from lab.replay.request import ReplayRequest
from lab.replay.simulate import Replayed, ReplicaSpec, replay
from lab.tune.knobs import Knob, Scoring, knobs, rounded, with_values
from policies.policy import PolicySettings, policies
from policies.rules.policy import ThresholdSettings

BUDGET = 6_000_000
"""Requests that are played at most, roughly, before the rest of the trace judges: two minutes on two cores."""

WINDOWS = 18
RUNGS = (9, 3, 1)
"""On each rung every so-manieth window is played, from the middle one of so many on."""

FEWEST_IN_WINDOW = 1000
"""Requests; what is shorter than `WINDOWS` such windows is played whole."""

FINALISTS = 3
_GO_ON = 3  # one of so many
_LEAD = 0.1  # of a window: played, so that the pool is not idle, but not counted
_AT_ONCE, _AT_ONCE_WHOLE = 9, 4  # settings that are proposed together, however many cores there are
_KEPT_BYTES = 2**29


class Window(NamedTuple):
    """Requests from `start` to `stop`, of which the first `lead` do not count."""

    start: int
    stop: int
    lead: int = 0


class Task(NamedTuple):
    """A policy to be played on a window."""

    policy: str
    settings: PolicySettings
    window: Window


PlayAll = Callable[[Sequence[Task]], Sequence[Replayed]]
"""Plays tasks, on as many cores as there are, and returns what came of each in the same order."""


class Ground:
    """Plays tasks; sent once to every process. What lookups find in texts is kept for the next task, within bounds."""

    def __init__(self, pool: Sequence[ReplicaSpec], requests: Sequence[ReplayRequest], seed: int) -> None:
        self._pool, self._requests, self._seed = pool, requests, seed
        self._made: dict[Window, list[ReplayRequest]] = {}
        self._room = _KEPT_BYTES

    def __call__(self, task: Task) -> Replayed:
        """Play one task; a policy without a seed of its own gets the ground's."""
        settings = task.settings
        if getattr(settings, "seed", 0) is None:
            settings = settings.model_copy(update={"seed": self._seed})
        policy = policies()[task.policy](settings)
        return replay(self._pool, self._of(task.window), policy, seed=self._seed, warmup=task.window.lead)

    def _of(self, window: Window) -> Sequence[ReplayRequest]:
        made = self._made.get(window)
        if made is not None:
            return made
        requests = self._requests[window.start : window.stop]
        speculating = [
            (one.method, draft_tokens(one.method, one.config), one.config)
            for one in self._pool
            if one.method is not Method.BASELINE
        ]
        size = 1000 * len(requests)
        if size > self._room:
            return requests
        made = list(requests)
        for request in made:
            if request.acceptance or request.text is not None:
                size += 8 * request.output_tokens * len(speculating)
        if size > self._room:
            return requests
        for request in made:
            if request.acceptance or request.text is not None:
                request.prepare(speculating)
        self._room -= size
        self._made[window] = made
        return made


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is played of the part that is tuned on.

    Parameters
    ----------
    windows
        In order; one that has all of a part that is short.
    rungs
        Places of the windows that are played on each rung, those of the rungs before left out.
    """

    requests: int
    windows: tuple[Window, ...]
    rungs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, requests: int, trials: int, budget: int) -> Schedule:
        """Cut windows that can be played for so many trials within a budget of requests."""
        if requests < WINDOWS * FEWEST_IN_WINDOW:
            return cls(requests, (Window(0, requests),), ((0,),))
        # Of each trial two windows, of a third of them four more, of a ninth the other twelve; and once for each number
        # that is put back, of which there are seldom more than ten.
        new = np.diff([0, *(WINDOWS // every for every in RUNGS)])
        plays = trials * float((new / _GO_ON ** np.arange(len(RUNGS))).sum()) + 10 * WINDOWS
        each = min(requests // WINDOWS, max(FEWEST_IN_WINDOW, int(budget / plays)))
        known: set[int] = set()
        rungs = []
        for every in RUNGS:
            rungs.append(tuple(place for place in range(every // 2, WINDOWS, every) if place not in known))
            known.update(rungs[-1])
        return cls(requests, tuple(spread(requests, each)), tuple(rungs))

    @property
    def played(self) -> int:
        """Requests in all windows."""
        return sum(window.stop - window.start for window in self.windows)


def spread(requests: int, each: int) -> list[Window]:
    """Return windows of `each` requests, in the middle of equal parts."""
    part = requests / WINDOWS
    starts = [int(part * place + (part - each) / 2) for place in range(WINDOWS)]
    return [Window(start, start + each, int(_LEAD * each)) for start in starts]


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    Parameters
    ----------
    settings
        The best; the present ones where nothing was better.
    asked
        Settings that were proposed: all, if the budget did not end before.
    trials
        Those of them that were played on each rung and left no more requests unserved there than the present ones.
    schedule
        On what.
    verified
        Requests that the finalists played beside the present rules in the end; 0 where trials had played all there is.
    """

    settings: ThresholdSettings
    asked: int
    trials: tuple[int, ...]
    schedule: Schedule
    verified: int


class Search:
    """Searches by a tree-structured Parzen estimator, from the present numbers on (Bergstra et al., NeurIPS 2011).

    Settings that leave more requests unserved than the present ones do not count.

    Parameters
    ----------
    play_all
        Plays tasks.
    scoring
        What less of is better.
    requests
        In the part that is tuned on, the first of what `play_all` knows.
    budget
        Requests to play at most, roughly: half of them for the search, half for what is played of its best.
    """

    def __init__(
        self, play_all: PlayAll, scoring: Scoring, requests: int, trials: int, seed: int, budget: int = BUDGET
    ) -> None:
        self._play_all, self._scoring, self._seed = play_all, scoring, seed
        self.trials, self._budget = trials, budget // 2
        self.schedule = Schedule.of(requests, trials, self._budget)
        self._left = self._budget
        self._counts = [0] * len(self.schedule.rungs)
        self._at_once = _AT_ONCE if len(self.schedule.windows) > 1 else _AT_ONCE_WHOLE

    def run(self, present: ThresholdSettings, progress: Callable[[float], None] | None = None) -> Found:
        """Search.

        Parameters
        ----------
        progress
            Called after each trial with the best score so far.
        """
        import optuna  # loads for a third of a second, and this module is loaded with every policy

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        movable = knobs(present)
        scales = {
            knob.name: optuna.distributions.FloatDistribution(knob.least, knob.most, log=knob.whole) for knob in movable
        }
        self._present = _Tried(present)
        self._climb([self._present], everywhere=True)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._seed))
        known = {knob.name: knob.present for knob in movable}
        study.add_trial(
            optuna.trial.create_trial(params=known, distributions=dict(scales), value=self._present.scores[-1])
        )
        whole = [self._present]
        asked = 0
        while asked < self.trials and self._left > 0:
            trials = [study.ask(dict(scales)) for _ in range(min(self._at_once, self.trials - asked))]
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
            return Found(best.settings, asked, counts, self.schedule, 0)
        others = [one for one in sorted(whole, key=lambda one: one.scores[-1]) if one.settings != best.settings]
        finalists = [best, *others][:FINALISTS]
        settings, verified = self._verified([one.settings for one in finalists])
        return Found(settings, asked, counts, self.schedule, verified)

    def _climb(self, tried: Sequence[_Tried], *, everywhere: bool = False) -> None:
        """Play settings on one rung after the other, of which the best third goes on to the next."""
        left = list(tried)
        for rung, places in enumerate(self.schedule.rungs):
            self._play(left, places)
            for one in left:
                one.scores.append(self._scoring(one.played))
            if everywhere:
                continue
            left = [one for one in left if one.errors <= self._present.errors_on(len(one.played))]
            self._counts[rung] += len(left)
            if rung == len(self.schedule.rungs) - 1:
                for one in left:
                    one.whole = True
            left = sorted(left, key=lambda one: one.scores[-1])[: math.ceil(len(left) / _GO_ON)]

    def _play(self, tried: Sequence[_Tried], places: Sequence[int]) -> None:
        windows = [self.schedule.windows[place] for place in places]
        answers = iter(self._run([(one.settings, window) for one in tried for window in windows]))
        for one in tried:
            one.played += [next(answers) for _ in windows]

    def _run(self, wanted: Sequence[tuple[ThresholdSettings, Window]]) -> Sequence[Replayed]:
        self._left -= sum(window.stop - window.start for _, window in wanted)
        return self._play_all([Task("thresholds", settings, window) for settings, window in wanted])

    def _settled(self, best: _Tried) -> _Tried:
        """Put back each number that did not help: of what a trace does not tell, a search would move them at random."""
        before = {knob.name: knob.present for knob in knobs(self._present.settings)}
        values = {knob.name: knob.present for knob in knobs(best.settings)}
        for name, value in before.items():
            if values[name] == value:
                continue
            try:
                one = _Tried(with_values(best.settings, {name: value}))
            except ValueError:
                continue
            self._climb([one], everywhere=True)
            if one.scores[-1] <= best.scores[-1] and one.errors <= self._present.errors:
                best = one
        return best

    def _verified(self, finalists: Sequence[ThresholdSettings]) -> tuple[ThresholdSettings, int]:
        """Return the best of some and of the present ones on the whole part, and how many requests each played."""
        present = self._present.settings
        all_of_them = [*(one for one in finalists if one != present), present]
        requests = self.schedule.requests
        each = self._budget // len(all_of_them)
        if each >= requests:
            windows = [Window(0, requests)]
        else:
            windows = spread(requests, max(each // WINDOWS, FEWEST_IN_WINDOW))
        answers = iter(self._run([(settings, window) for settings in all_of_them for window in windows]))
        tried = [_Tried(settings, [next(answers) for _ in windows]) for settings in all_of_them]
        least_errors = tried[-1].errors
        usable = [one for one in tried if one.errors <= least_errors]
        best = min(usable, key=lambda one: self._scoring(one.played))
        return best.settings, sum(window.stop - window.start for window in windows)


class _Tried:
    """Settings with what they came to: in the order of the rungs, and scored after each of them."""

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


def _settings(present: ThresholdSettings, params: dict[str, float], movable: Sequence[Knob]) -> _Tried | None:
    """Return the present rules with other numbers; None if a condition could never hold then."""
    values = {knob.name: rounded(params[knob.name], knob) for knob in movable}
    for name, low in values.items():
        high = values.get(other := name.removesuffix(".low") + ".high")
        if name.endswith(".low") and high is not None and low > high:  # an empty span would be a trial for nothing
            values |= {name: high, other: low}
    try:
        return _Tried(with_values(present, values))
    except ValueError:  # pydantic's too
        return None
