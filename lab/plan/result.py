"""The results of a search and its judgment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lab.plan.mixes import Mix, ReplicaKind
from lab.simulation.simulate import Replayed, slo_kept
from lab.statistics import Floats, Interval


@dataclass(frozen=True, slots=True)
class PlanObjective:
    """The objective: the least mean time to finish, or, with bounds, the most requests that keep their SLO."""

    # Bounds in seconds as for `lab.simulation.simulate.slo_kept`; empty: mean time to finish.
    slo: Mapping[str, float] = field(default_factory=dict)

    def values(self, played: Replayed) -> Floats:
        """Return the value of each served request: seconds to finish, or 1 if it kept its SLO and 0 if not."""
        return slo_kept(played, self.slo).astype(np.float64) if self.slo else played.e2e_s

    def value(self, played: Sequence[Replayed]) -> float:
        """Return the mean value; an unserved request misses its SLO, or takes infinitely long."""
        errors = sum(one.errors for one in played)
        values = np.concatenate([self.values(one) for one in played])
        if self.slo:
            return float(values.sum() / (len(values) + errors))
        return math.inf if errors else float(values.mean())

    def loss(self, played: Sequence[Replayed]) -> float:
        """Return the value so that less is better."""
        return -self.value(played) if self.slo else self.value(played)

    def cost(self, played: Sequence[Replayed]) -> float:
        """Return the quantity to minimize; of mixes that keep the SLO equally often, the fastest costs least."""
        if not self.slo:
            return self.loss(played)
        e2e_s = np.concatenate([one.e2e_s for one in played])
        return self.loss(played) + _TIE_PER_S * float(e2e_s.sum()) / max(1, len(e2e_s))


@dataclass(frozen=True, slots=True)
class JudgedMix:
    """The result of a mix on the windows held out from the search."""

    mix: Mix
    e2e_s: float
    ttft_s: float
    tpot_s: float
    value: float  # mean seconds to finish, or share of requests that kept their SLO
    # Loss with this mix instead of the chosen one, with its 95% interval: extra time to finish as a share of the chosen
    # mix's, or the share of the requests within the chosen mix's SLO that it loses. None for the chosen mix itself,
    # with too few requests, and if requests were not served.
    loss: Interval | None
    worse_in: float  # share of windows in which this mix is worse than the chosen one


@dataclass(frozen=True, slots=True)
class Plan:
    """The mix that serves the traffic best."""

    kinds: tuple[ReplicaKind, ...]
    chosen: Mix  # the planned mix; the first of `judged`
    # The plan, the search's best others, each method's best mix of one kind, the best of several methods, and the
    # current mix; best first after the plan.
    judged: tuple[JudgedMix, ...]
    alike: Mix  # the best judged mix of one kind
    mixed: Mix | None  # the best one of several methods
    present: Mix | None  # the running mix
    tried: int  # number of mixes

    def label(self, mix: Mix) -> str:
        """Return a mix's label, such as `the plan, best of one kind`; empty if it is nothing notable."""
        count = len(self.present or ())
        named = (
            ("the plan", self.chosen),
            ("best of one kind", self.alike),
            ("best of several methods", self.mixed),
            ("present" if count == len(self.chosen) else f"present, with {count} replicas", self.present),
        )
        return ", ".join(word for word, one in named if one == mix)

    def result(self, mix: Mix) -> JudgedMix:
        """Return the result of a judged mix."""
        return next(one for one in self.judged if one.mix == mix)


_TIE_PER_S: Final = 1e-7
"""Share of requests within the SLO that a second of the mean time to finish outweighs: one of ten million."""
