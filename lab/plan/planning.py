"""Plan a mix for requests: the kinds that fit, the search, and the judgement; prints nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from backends.calibration.calibration import Calibration
from backends.memory.estimate import Machine
from backends.speculation import Method
from gateway.config.settings import PolicyReference
from lab.options.policy import with_seed
from lab.parallel import all_cores, ray_cluster
from lab.plan.mixes import USUAL, Kind, Mix, kind_of, kinds, machine_of
from lab.plan.search import MixRunner, Objective, Plan, RunAll, Task, find_mix
from lab.replay.request import ReplayRequest
from lab.replay.simulate import Replayed

Windows = tuple[tuple[ReplayRequest, ...], ...]
"""Windows of the traffic in order of time, each with its requests in order of arrival."""

Replica = tuple[Method, Mapping[str, Any]]
"""Method and speculative config of a replica."""

_WINDOW = 500
_MOST_WINDOWS = 16
_ROUNDED_TO = 1024


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for one GPU type.

    Parameters
    ----------
    max_model_len
        Context in tokens that the replicas need.
    plan
        None if no kind of replica fits.
    kinds
        All kinds, also those that do not fit; mixes are indices of these.
    """

    calibration: Calibration
    machine: Machine
    max_model_len: int
    plan: Plan | None
    kinds: tuple[Kind, ...]

    @property
    def replicas(self) -> tuple[Kind, ...]:
        """The kind of each planned replica; empty if none fits."""
        return () if self.plan is None else tuple(self.kinds[index] for index in self.plan.chosen)


def plan_mix(
    requests: Sequence[ReplayRequest],
    calibration: Calibration,
    replicas: int,
    *,
    present: Sequence[Replica] = (),
    policy: PolicyReference,
    methods: Sequence[tuple[Method, Sequence[int]]] = USUAL,
    schedules: bool = True,
    budget: int = 200,
    seeds: int = 2,
    jobs: int | None = None,
) -> Planned:
    """Find the mix of replicas that serves requests best.

    Parameters
    ----------
    requests
        Requests in order of arrival; cut into windows of equal size.
    replicas
        Number of replicas.
    present
        The replicas that run now, for comparison; empty for none.
    policy
        Policy that routes.
    methods
        Methods to try, with their k.
    schedules
        Whether methods that draft with a model are also tried with k by batch size.
    budget
        Approximate number of mixes to try.
    seeds
        Number of seeds in the judgement.
    jobs
        Processes; None for one per core, 1 for this one.

    Raises
    ------
    ValueError
        If there are too few requests, no method's speed is known, or no mix tried serves all requests.
    """
    effort = Effort(budget, seeds, jobs)
    options = Candidates(methods, schedules)
    return plan_windows(windows_of(requests), calibration, replicas, present, policy, options, effort)


@dataclass(frozen=True, slots=True)
class Effort:
    """Mixes to try, seeds in the judgement, and where to run: processes, or the address of a Ray cluster."""

    budget: int = 200
    seeds: int = 2
    jobs: int | None = None
    ray: str | None = None

    def run(self, runner: MixRunner) -> AbstractContextManager[RunAll]:
        """Return a context with a function that runs tasks."""
        work = _QuietRunner(runner)
        return ray_cluster(work, self.ray) if self.ray is not None else all_cores(work, self.jobs)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Methods to try with their k, and whether also with k by batch size."""

    methods: Sequence[tuple[Method, Sequence[int]]] = USUAL
    schedules: bool = True


def windows_of(requests: Sequence[ReplayRequest]) -> Windows:
    """Cut requests into windows of equal size.

    Raises
    ------
    ValueError
        If there are too few.
    """
    count = max(2, min(_MOST_WINDOWS, len(requests) // _WINDOW))
    if len(requests) < 2 * count:
        raise ValueError(f"{len(requests)} requests are too few to plan on")
    size = -(-len(requests) // count)
    return tuple(tuple(requests[start : start + size]) for start in range(0, len(requests), size))


def plan_windows(
    windows: Windows,
    calibration: Calibration,
    replicas: int,
    present: Sequence[Replica],
    policy: PolicyReference,
    candidates: Candidates,
    effort: Effort,
    *,
    objective: Objective | None = None,
    machine: Machine | None = None,
) -> Planned:
    """Find the mix that serves windows of traffic best; see `plan_mix`.

    Parameters
    ----------
    objective
        The mean time to finish if None.
    machine
        GPUs of a replica; those of the calibration if None.
    """
    machine = machine or machine_of(calibration)
    longest = max(request.prompt_tokens + request.output_tokens for window in windows for request in window)
    known = kinds(calibration, machine, longest, candidates.methods)
    if not known:
        names = ", ".join(method for method, _ in candidates.methods)
        raise ValueError(f"no acceptance and draft of {names} are published for {calibration.target}")
    present_mix = _present(present, calibration, machine, known)
    usable = [index for index, kind in enumerate(known) if kind.fit.fits]  # those of the present replicas too
    if not usable:
        return Planned(calibration, machine, longest, None, tuple(known))
    runner = MixRunner(calibration.name, tuple(known), policy.name, with_seed(policy.settings, 0), windows)
    with effort.run(runner) as run_all:
        plan = find_mix(
            runner,
            usable,
            replicas,
            run_all,
            objective=objective or Objective(),
            present=present_mix,
            budget=effort.budget,
            seeds=effort.seeds,
        )
    room = min(known[index].fit.tokens - known[index].k for index in plan.chosen)
    rounded = -(-longest // _ROUNDED_TO) * _ROUNDED_TO
    return Planned(calibration, machine, min(rounded, room, calibration.scheduler.max_model_len), plan, tuple(known))


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


@dataclass(frozen=True, slots=True)
class _QuietRunner:
    """A runner that silences the policies' log messages, which concern simulated replicas."""

    runner: MixRunner

    def __call__(self, task: Task) -> Replayed:
        logging.getLogger("policies").setLevel(logging.ERROR)
        return self.runner(task)
