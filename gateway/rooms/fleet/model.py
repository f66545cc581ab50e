"""The traffic of a model, the replicas that keep its targets, and their cost in time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from backends.backend import Candidate
from gateway.rooms.fleet.capacity import Carrier, Targets, World, carrier
from gateway.rooms.fleet.demand import (
    DAY_MINUTES,
    HOUR_MINUTES,
    SHORT_MINUTES,
    START_UP_MINUTES,
    Minute,
    finish_s,
    forecast,
    present,
    usual,
)
from policies.learned.belief import belief_of
from policies.learned.policy import Learned

MISSES: Final = 0.01
"""Share of the requests that may miss the targets."""
MOST: Final = 3.0
_GAIN: Final = 0.5
_BUSY: Final = 0.75
"""Saturation from which few misses mean that fewer replicas would do."""
_LEARNING_MINUTES: Final = 15
_FORGETTING_MINUTES: Final = 7 * DAY_MINUTES


class Judged(NamedTuple):
    """Requests that a method served within the targets, and too late."""

    kept: float
    missed: float


class Correction:
    """A factor on the demand of a traffic on the replicas of a method.

    Each minute it moves by how far the misses are from their share, and so converges whatever is wrong with the
    formulas: Gibbs and Candès, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021. It stays while
    misses say nothing about it: many with too few replicas, and few with too many.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._hopeless = 0.0  # share of requests that miss the targets at the largest factor
        self._busy: deque[float] = deque(maxlen=SHORT_MINUTES)

    def update(self, judged: Judged, saturation: float) -> None:
        """Update the factor with the requests of a minute.

        Parameters
        ----------
        judged
            Its requests.
        saturation
            Load of the replicas that were up, with the factor.
        """
        if not math.isnan(saturation):
            self._busy.append(saturation)
        if not (ended := sum(judged)):  # a method without replicas may serve later traffic
            self.factor **= 1.0 - 1.0 / _FORGETTING_MINUTES
            return
        if not self._busy:
            return
        share, busiest = judged.missed / ended, max(self._busy)
        if self.factor > 0.9 * MOST and busiest <= 1.0:
            self._hopeless += (share - self._hopeless) / _LEARNING_MINUTES
        else:
            self._hopeless *= 1.0 - 1.0 / _FORGETTING_MINUTES
        excess = share - MISSES - self._hopeless
        if busiest <= 1.0 if excess > 0.0 else busiest > _BUSY:
            self.factor = min(MOST, max(1.0 / MOST, self.factor * math.exp(_GAIN * excess)))


class Change(NamedTuple):
    """A change of replicas for a traffic."""

    counts: Mapping[str, int]  # by method
    # seconds, then_s: mean to finish, as measured on the current replicas, and as expected after the change.
    seconds: float
    then_s: float


NOTHING = Change({}, math.nan, math.nan)


class ModelFleet:
    """The traffic of a model, and the replicas that it needs."""

    def __init__(self, day_minutes: int = DAY_MINUTES, ahead_minutes: int = START_UP_MINUTES) -> None:
        self.day_minutes = day_minutes
        self.ahead_minutes = ahead_minutes  # until a replica is up
        self.minutes: deque[Minute] = deque(maxlen=day_minutes + HOUR_MINUTES)
        self.corrections: defaultdict[str, Correction] = defaultdict(Correction)  # by method
        self.judged: dict[str, Judged] = {}  # within the last minute, by method
        self._totals: Minute | None = None
        self._judged_totals: Mapping[str, Judged] = {}
        self._of_engines: dict[str, int] = {}  # last known count of each
        self._engine_tokens = 0
        self._carriers: dict[str, Carrier] = {}  # including methods no longer up
        self._past: deque[Mapping[str, int]] = deque(maxlen=day_minutes)  # counts needed
        self.forget("its requests are not counted yet")

    def forget(self, missing: str) -> None:
        """Reset the results; `missing` says why the replicas that it needs are unknown."""
        self.missing = missing  # why its needs are unknown; empty if they are known
        self.targets = Targets(None, None)
        self.saturation = math.nan
        self.up: Counter[str] = Counter()
        self.needed = NOTHING  # for the forecast traffic; its times are of the last hour
        # For an operator, who acts rarely: those, plus current replicas that were needed within the last day.
        self.advised = NOTHING
        self._past.clear()

    def engine_tokens(self, counted: Mapping[str, int | None]) -> float:
        """Return the total output tokens of all engines, each since its first reading; None means unknown now.

        An engine that joins may have counted for weeks, which is not this minute's traffic.
        """
        known, now = self._of_engines, {name: tokens for name, tokens in counted.items() if tokens is not None}
        self._engine_tokens += sum(max(0, tokens - known.get(name, tokens)) for name, tokens in now.items())
        self._of_engines = {name: known[name] for name in counted if name in known} | now
        return self._engine_tokens

    def count(self, totals: Minute, judged: Mapping[str, Judged]) -> None:
        """Add a minute, from totals since the start; `judged` is by method."""
        if self._totals is not None:
            self.minutes.append(Minute(*_since(self._totals, totals)))
            before = self._judged_totals
            self.judged = {each: Judged(*_since(before.get(each, _NONE), now)) for each, now in judged.items()}
        self._totals, self._judged_totals = totals, judged

    def update(self, learned: Learned, up: Sequence[tuple[str, Candidate]], cached: float) -> None:
        """Compute the replicas that keep the targets, from what was learned.

        Parameters
        ----------
        up
            The backends that are up, each with the name of its method.
        cached
            Share of the prompt tokens found in prefix caches.
        """
        targets, minutes = Targets(*learned.settings.slo.seconds), list(self.minutes)
        if targets == Targets(None, None):
            missing = "set `slo` of its policy (`ttft_ms`, `tpot_ms`): without targets any number of replicas would do"
            self.forget(missing)
            return
        batch = max(1.0, sum(each.in_flight + each.load.others for _, each in up) / max(1, len(up)))
        groups = belief_of(learned, [each for _, each in up], batch).groups
        for method, each in up:
            if (replica := learned.known.replicas.get(each.name)) is not None:
                found = carrier(replica, groups, batch, each.load.kv_tokens)
                if found.per_step:
                    self._carriers[method] = found
        if not groups or not self._carriers or len(minutes) < SHORT_MINUTES:
            return
        for method, judged in self.judged.items():
            self.corrections[method].update(judged, self.saturation)
        self.targets, self.up = targets, Counter(method for method, _ in up)
        factors = [self.corrections[each].factor for each in self._carriers]
        world = World(groups, self._carriers, targets, cached, factors)
        self.saturation = world.load_of(present(minutes)).saturation(self.up)
        hour = max(SHORT_MINUTES, min(HOUR_MINUTES, self.day_minutes // 24))
        if (busy := sum(each.requests > 0 for each in minutes)) < hour:
            self.missing = f"it is known after an hour of traffic, of which there were {busy} minutes"
            return
        needed = world.load_of(forecast(minutes, self.day_minutes, self.ahead_minutes)).needed(self.up)
        if not needed:
            self.missing = f"no number of its replicas keeps {targets} for such requests"
            self.needed = self.advised = NOTHING
            return
        self._past.append(needed)
        kept = {each: max(count, min(self.up[each], self._most(each))) for each, count in needed.items()}
        self.needed = self._change(needed, minutes[-hour:], world)
        self.advised = self._change(kept, minutes, world)
        self.missing = ""  # last: this runs in a thread, and others may read meanwhile

    def _most(self, method: str) -> int:
        return max(each.get(method, 0) for each in self._past)

    def _change(self, counts: Mapping[str, int], minutes: Sequence[Minute], world: World) -> Change:
        seconds = finish_s(minutes)
        if math.isnan(seconds):
            return Change(counts, seconds, seconds)
        load = world.load_of(usual(minutes))
        present_s = load.finish_s(self.up)
        then_s = seconds * load.finish_s(counts) / present_s if present_s < math.inf else math.nan
        return Change(counts, seconds, then_s)


def _since(before: Iterable[float], now: Iterable[float]) -> Iterator[float]:
    """Yield the growth of counters; a counter that was reset has none."""
    return (max(0.0, each - then) for then, each in zip(before, now, strict=True))


_NONE: Final = Judged(0.0, 0.0)
