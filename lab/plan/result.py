"""What a search and its judgement found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lab.plan.mixes import Mix, ReplicaKind
from lab.simulation.simulate import Replayed, slo_kept
from lab.statistics import Floats, Interval


@dataclass(frozen=True, slots=True)
class PlanObjective:
    """The objective: the least mean time to finish, or, with bounds, the most requests that keep their SLO."""

    # Bounds in seconds as for `lab.simulation.simulate.slo_kept`; empty for the mean time to finish.
    slo: Mapping[str, float] = field(default_factory=dict)

    def values(self, played: Replayed) -> Floats:
        """Return the value of each served request: seconds to finish, or 1 if it kept its SLO and 0 if not."""
        return slo_kept(played, self.slo).astype(np.float64) if self.slo else played.e2e_s

    def value(self, played: Sequence[Replayed]) -> float:
        """Return the mean value; a request that was not served misses its SLO, or takes infinitely long."""
        errors = sum(one.errors for one in played)
        values = np.concatenate([self.values(one) for one in played])
        if self.slo:
            return float(values.sum() / (len(values) + errors))
        return math.inf if errors else float(values.mean())

    def cost(self, played: Sequence[Replayed]) -> float:
        """Return the quantity to minimize."""
        return -self.value(played) if self.slo else self.value(played)


@dataclass(frozen=True, slots=True)
class JudgedMix:
    """The result of a mix on the windows held out from the search."""

    mix: Mix
    e2e_s: float
    ttft_s: float
    tpot_s: float
    value: float  # mean seconds to finish, or share of requests that kept their SLO
    # What is lost with this mix instead of the chosen one, with its 95% interval: time to finish in excess of the
    # chosen mix's, as a share of that, or the share of its requests in the SLO that are missed. None for the chosen mix
    # itself, with too few requests, and if requests were not served.
    loss: Interval | None
    worse_in: float  # share of windows in which this mix is worse than the chosen one


@dataclass(frozen=True, slots=True)
class Plan:
    """The mix that serves the traffic best."""

    kinds: tuple[ReplicaKind, ...]
    chosen: Mix  # the planned mix; the first of `judged`
    # The plan, the best others of the search, the best mix with all replicas alike for each method, the best one of
    # several methods, and the present mix, the best first after the plan.
    judged: tuple[JudgedMix, ...]
    alike: Mix  # the best one judged with all replicas alike
    mixed: Mix | None  # the best one of several methods
    present: Mix | None  # what runs now
    tried: int  # number of mixes

    def label(self, mix: Mix) -> str:
        """Return what a mix is, such as `the plan, best of one kind`; empty for one that is nothing of note."""
        count = len(self.present or ())
        named = (
            ("the plan", self.chosen),
            ("best of one kind", self.alike),
            ("best of several methods", self.mixed),
            ("present" if count == len(self.chosen) else f"present, with {count} replicas", self.present),
        )
        return ", ".join(word for word, one in named if one == mix)

    def result(self, mix: Mix) -> JudgedMix:
        """Return the result of a mix that was judged."""
        return next(one for one in self.judged if one.mix == mix)
