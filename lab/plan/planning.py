"""Plan a mix for requests: the kinds that fit, the search, the judgement and the reason; prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from backends.calibration.calibration import Calibration
from backends.memory.estimate import Machine
from backends.speculation import Method
from gateway.config.settings import PolicyReference
from lab.options.policy import with_seed
from lab.parallel import all_cores, ray_cluster
from lab.plan.explain import Rivals, explain
from lab.plan.judge import choose, judged, play
from lab.plan.mixes import USUAL, Kind, Mix, kind_of, kinds, machine_of
from lab.plan.result import Objective, Plan
from lab.plan.runner import MixRunner, RunAll
from lab.plan.schedules import with_schedules
from lab.plan.search import Split, find_mixes
from lab.plan.traffic import Windows

Replica = tuple[Method, Mapping[str, Any]]
"""Method and speculative config of a replica."""

_ROUNDED_TO = 1024


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for one GPU type."""

    calibration: Calibration
    machine: Machine
    max_model_len: int  # context in tokens that the replicas need
    plan: Plan | None  # none if no kind of replica fits
    kinds: tuple[Kind, ...]  # all kinds, also those that do not fit; mixes are indices of these

    @property
    def replicas(self) -> tuple[Kind, ...]:
        """The kind of each planned replica; empty if none fits."""
        return () if self.plan is None else tuple(self.kinds[index] for index in self.plan.chosen)


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan."""

    methods: Sequence[tuple[Method, Sequence[int]]] = USUAL  # methods to try, with their k
    schedules: bool = True  # whether methods that draft with a model are also tried with k by batch size
    budget: int = 200  # approximate number of mixes to try
    seeds: int = 2  # number of seeds in the judgement
    # jobs, ray: processes, or the address of a Ray cluster; None for one process per core, 1 for this process.
    jobs: int | None = None
    ray: str | None = None
    objective: Objective = field(default_factory=Objective)
    watch: Callable[[RunAll], RunAll] | None = None  # wraps the function that runs tasks, to show progress

    def run(self, runner: MixRunner) -> AbstractContextManager[RunAll]:
        """Return a context with a function that runs tasks."""
        return ray_cluster(runner, self.ray) if self.ray is not None else all_cores(runner, self.jobs)


def plan_windows(
    windows: Windows,
    calibration: Calibration,
    replicas: int,
    present: Sequence[Replica],
    policy: PolicyReference,
    options: Options,
    machine: Machine | None = None,
) -> Planned:
    """Find the mix that serves windows of traffic best."""
    machine = machine or machine_of(calibration)
    longest = max(request.prompt_tokens + request.output_tokens for window in windows for request in window)
    known = kinds(calibration, machine, longest, options.methods)
    if not known:
        names = ", ".join(method for method, _ in options.methods)
        raise ValueError(f"no acceptance and draft of {names} are published for {calibration.target}")
    if options.schedules:
        known = with_schedules(known, calibration, [request for window in windows for request in window])
    present_mix = _present(present, calibration, machine, known)
    usable = [index for index, kind in enumerate(known) if kind.fit.fits]  # those of the present replicas too
    if not usable:
        return Planned(calibration, machine, longest, None, tuple(known))
    runner = MixRunner(calibration.name, tuple(known), policy.name, with_seed(policy.settings, 0), windows)
    with options.run(runner) as run_all:
        watched = run_all if options.watch is None else options.watch(run_all)
        plan = _plan(runner, usable, replicas, watched, present_mix, options)
    room = min(known[index].fit.tokens - known[index].k for index in plan.chosen)
    rounded = -(-longest // _ROUNDED_TO) * _ROUNDED_TO
    return Planned(calibration, machine, min(rounded, room, calibration.scheduler.max_model_len), plan, tuple(known))


def _plan(
    runner: MixRunner, usable: Sequence[int], replicas: int, run_all: RunAll, present: Mix | None, options: Options
) -> Plan:
    split, objective, seeds = Split.of(len(runner.windows)), options.objective, options.seeds
    found = find_mixes(
        runner.kinds, usable, replicas, split, run_all, objective, present=present, budget=options.budget
    )
    played = play(found.finalists, split, seeds, run_all)
    chosen = choose(found, played, seeds, objective)
    ranked = sorted(found.finalists, key=lambda mix: objective.cost(played[mix]))
    alike = chosen if len(set(chosen)) == 1 else next(mix for mix in ranked if len(set(mix)) == 1)
    mixed = chosen if len(set(chosen)) > 1 else next((mix for mix in ranked if len(set(mix)) > 1), None)
    rival = mixed if chosen == alike else alike
    reason = None
    if rival is not None:
        reason = explain(Rivals(chosen, rival, split, run_all, objective), played, seeds, runner.windows)
    results = tuple(judged(chosen, played, seeds, objective))
    return Plan(runner.kinds, chosen, results, alike, mixed, present, found.tried, found.possible, reason)


def _present(replicas: Sequence[Replica], calibration: Calibration, machine: Machine, known: list[Kind]) -> Mix | None:
    """Return the present mix, adding its kinds to `known`."""
    mix = []
    for method, config in replicas:
        kind = kind_of(method, config, calibration, machine)
        same = [index for index, other in enumerate(known) if _same(other, kind)]
        if not same:
            known.append(kind)
        mix.append(same[0] if same else len(known) - 1)
    return tuple(sorted(mix)) or None


def _same(one: Kind, other: Kind) -> bool:
    without = [{key: value for key, value in kind.config.items() if key != "model"} for kind in (one, other)]
    return one.method is other.method and one.k == other.k and without[0] == without[1]
