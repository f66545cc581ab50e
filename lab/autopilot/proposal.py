"""Which replica should run what: a plan, assigned so that as few replicas as possible change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from backends.calibration.calibration import Calibration
from backends.speculation import Method
from gateway.config.settings import PolicyReference
from lab.autopilot.journal import Speculation
from lab.plan.mixes import USUAL, Kind
from lab.plan.planning import Planned, plan_mix
from lab.replay.request import ReplayRequest
from lab.statistics import Interval

WITHOUT_WEIGHTS = (Method.BASELINE, Method.NGRAM)
"""Methods that every vLLM runs, without a drafter's weights or a further package."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What should run.

    Parameters
    ----------
    changes
        The replicas that change, with what they should run; empty if the present fleet is best.
    gain
        Share of the mean time to finish that this saves; None if it could not be told.
    kept
        The replicas that stay as they are.
    """

    changes: Mapping[str, Speculation]
    kept: Mapping[str, Speculation]
    gain: Interval | None


@dataclass(frozen=True, slots=True)
class Rule:
    """When a gain is worth a change.

    Parameters
    ----------
    margin
        Least share of the time saved.
    restart_s
        Seconds that a restart takes a replica out.
    lasts_s
        Seconds for which the change is expected to be right: as long as the period planned on.
    """

    margin: float
    restart_s: float
    lasts_s: float

    def least_gain(self, restarts: int, replicas: int) -> float:
        """Return the least gain: the margin, and the share of the fleet's capacity that the restarts cost."""
        return self.margin + restarts * self.restart_s / (replicas * self.lasts_s)

    def objection(self, proposal: Proposal) -> str | None:
        """Return why the proposal is not worth its restarts; None if it is."""
        restarts, gain = len(proposal.changes), proposal.gain
        if not restarts:
            return "the present replicas are best"
        if gain is None:
            return "its gain cannot be told"
        least = self.least_gain(restarts, restarts + len(proposal.kept))
        if gain.low <= 0.0:
            return f"a gain of {gain.value:.1%} ({gain.low:+.1%} to {gain.high:+.1%}) may be chance"
        if gain.value < least:
            return f"a gain of {gain.value:.1%} is less than {least:.1%}, which {restarts} restarts should bring"
        return None


def methods_for(present: Sequence[Speculation], more: Sequence[str]) -> list[tuple[Method, Sequence[int]]]:
    """Return the methods to try: those of the pool, those that need no weights, and those asked for; with their k."""
    usual = dict(USUAL)
    names = [*WITHOUT_WEIGHTS, *(one.method for one in present), *map(Method, more)]
    return [(method, usual.get(method, (3,))) for method in dict.fromkeys(names)]


def propose(
    requests: Sequence[ReplayRequest],
    calibration: Calibration,
    present: Mapping[str, Speculation],
    policy: PolicyReference,
    methods: Sequence[tuple[Method, Sequence[int]]],
    *,
    budget: int,
    jobs: int | None = None,
    plan: Callable[..., Planned] = plan_mix,
) -> Proposal:
    """Plan for requests, and assign the plan to the replicas.

    Raises
    ------
    ValueError
        If nothing can be planned.
    """
    now = [(one.method, one.config) for one in present.values()]
    planned = plan(
        requests,
        calibration,
        len(present),
        present=now,
        policy=policy,
        methods=methods,
        reason=False,
        budget=budget,
        jobs=jobs,
    )
    if planned.plan is None:
        raise ValueError("no method that was tried fits into the memory of the GPUs")
    chosen = [planned.kinds[index] for index in planned.plan.chosen]
    changes, kept = assigned(chosen, present)
    judged = next((one for one in planned.plan.judged if one.mix == planned.plan.present), None)
    return Proposal(changes, kept, None if judged is None else judged.gain)


def assigned(
    chosen: Sequence[Kind], present: Mapping[str, Speculation]
) -> tuple[dict[str, Speculation], dict[str, Speculation]]:
    """Assign kinds to replicas; return the replicas that change, and those that stay.

    A replica that runs one of the kinds keeps it, so that as few as possible change. A drafter's weights are those that
    another replica of the pool has with the same method, where there is one.
    """
    wanted = [_speculation(kind, list(present.values())) for kind in chosen]
    changes: dict[str, Speculation] = {}
    kept: dict[str, Speculation] = {}
    for name, runs in present.items():
        same = next((one for one in wanted if is_same(one, runs)), None)
        if same is not None:
            wanted.remove(same)
            kept[name] = runs
    for name in present:
        if name not in kept:
            changes[name] = wanted.pop(0)
    return changes, kept


def is_same(one: Speculation, other: Speculation) -> bool:
    """Return whether two replicas draft alike; drafters' weights may have several names."""
    configs = [
        {key: value for key, value in each.config.items() if key not in ("model", "method")} for each in (one, other)
    ]
    return one.method is other.method and configs[0] == configs[1]


def _speculation(kind: Kind, present: Sequence[Speculation]) -> Speculation:
    config = orjson.loads(orjson.dumps(kind.config))  # lists, as in a pool file
    for one in present:
        if one.method is kind.method and "model" in one.config:
            config["model"] = one.config["model"]
    return Speculation(method=kind.method, config=config)
