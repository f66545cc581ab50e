"""Compare three gateways' learning with one.

`python -m benchmarks.routing.shared_learning FOLDER [--redis URL] [--seeds N]`.

The workloads are those of `benchmarks.routing` (see there for FOLDER), in virtual time. The same arrivals at the same
replicas pass through one gateway, or are split at random over three, each with its own `learned`. These share their
observations through a real store, as the gateway does (`gateway.state.ledger`): an SQLite file, or Redis. They exchange
once per virtual second, fit as often as one gateway does, and know their own requests in flight exactly.

A gateway with Redis knows the requests in flight of the others as they were up to a tenth of a second ago
(`exchange`: here always as of 0.1 s ago); without Redis, from the engines' reports, which are up to two seconds old
(`reports`). What that costs has nothing to do with learning, so each run is also played with the others' requests known
exactly (`exact`). The table shows the mean end-to-end time as a geometric mean over
mixes and loads, with 95% intervals over all runs: relative to one gateway, and as regret relative to one gateway that
was trained on other requests before.
"""

from __future__ import annotations

import argparse
import heapq
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from uuid import uuid4

import numpy as np

from backends.backend import EngineLoad
from backends.calibration.calibration import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.draft_schedule import DraftSchedule, draft_schedule
from backends.simulator.engine.fleet import Fleet, Replica
from backends.speculation import Method
from benchmarks.routing.ground import POOLS, Ground, Task, drawn, ground_of, pool_of, prepare, timed
from gateway.state.ledger import Ledger
from gateway.state.redis import RedisStore
from gateway.state.sqlite import SqliteStore
from gateway.state.store import Store
from lab.replay.request import ReplayRequest
from lab.replay.simulate import ReplicaSpec, SimulatedShadowDrafting, outcome_of, set_learned
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Decision

REQUESTS = 2000
PARTS = {"1 to 250": slice(250), "251 to 1,000": slice(250, 1000), "1,001 to 2,000": slice(1000, 2000)}
MIXES = ("even", "templates")
LOADS = (0.25, 0.75)
SYNC_S = 1.0
MAINTENANCE_S = 0.5
MAINTENANCE_REQUESTS = 50
REPORT_S = 2.0
EXCHANGE_S = 0.1
"""Age of the other gateways' counts with `exchange`."""


@dataclass(slots=True)
class ReplicaView:
    """A replica as one of several gateways sees it (a `backends.backend.Candidate`)."""

    name: str
    method: Method
    draft_schedule: DraftSchedule
    weight: float = 1.0
    in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum tokens drafted per step."""
        return self.draft_schedule.k


@dataclass(slots=True)
class Member:
    """One of the gateways, with its policy, its view of the replicas, and its shared state."""

    policy: Learned
    replicas: list[ReplicaView]
    ledger: Ledger | None = None
    store: Store | None = None
    in_flight: dict[int, tuple[int, ReplayRequest, Decision]] = field(default_factory=dict)

    def sync(self) -> None:
        """Exchange observations with the store."""
        if self.ledger is not None and self.store is not None:
            self.ledger.stage()
            self.ledger.exchange(self.store, self.store.stamps())
            self.ledger.settle()


class Simulation:
    """Arrivals at a pool behind several gateways.

    Parameters
    ----------
    loads
        How each gateway knows the requests in flight of the others: `exact`, `exchange` or `reports`.
    """

    def __init__(self, specs: Sequence[ReplicaSpec], members: Sequence[Member], seed: int, loads: str) -> None:
        self._specs = specs
        replicas = []
        for spec in specs:
            calibration = load_calibration(spec.calibration)
            parameters = EngineParameters.of(calibration, spec.method, spec.config)
            replicas.append(Replica(spec.name, calibration, spec.method, spec.config, parameters=parameters))
        self._fleet = Fleet(replicas, seed)
        self._members = members
        self._loads = loads
        self._changes: list[tuple[float, int, int, int]] = []  # to publish: time, member, replica, +1 or -1
        self._published = [[0] * len(specs) for _ in members]
        self._foreign = [[0] * len(specs) for _ in members]
        self._rng = Random(seed)
        self._shadow = SimulatedShadowDrafting(specs, members[0].policy.shadow, seed)
        self._base_s = time.time()  # stores drop expired pages
        self._now_s = self._sync_s = self._maintenance_s = self._report_s = 0.0
        self._finished = self._fitted = 0
        for member in members:
            member.policy.set_clock(lambda: self._base_s + self._now_s)

    def play(self, requests: Sequence[ReplayRequest]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the end-to-end seconds of each request."""
        e2e_s = np.zeros(len(requests))
        for number, request in enumerate(requests):
            self._advance(request.arrived_s, e2e_s)
            self._now_s = request.arrived_s
            self._run_periodic_work()
            member = self._members[self._rng.randrange(len(self._members))]
            decision = member.policy.choose(request.features, member.replicas)
            index = next(index for index, spec in enumerate(self._specs) if spec.name == decision.backend)
            spec = self._specs[index]
            script = request.script(spec.method, member.replicas[index].num_speculative_tokens, spec.config)
            assert script is not None
            identity = self._fleet.submit_script(index, script, self._now_s)
            member.in_flight[identity] = number, request, decision
            member.replicas[index].in_flight += 1
            self._change(self._now_s, member, index, 1)
        self._advance(math.inf, e2e_s)
        return e2e_s

    def _advance(self, until_s: float, e2e_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        for completion in self._fleet.advance(until_s):
            member = next(each for each in self._members if completion.request_id in each.in_flight)
            number, request, decision = member.in_flight.pop(completion.request_id)
            member.replicas[completion.replica].in_flight -= 1
            self._change(completion.ended_s, member, completion.replica, -1)
            e2e_s[number] = completion.e2e_s
            outcome = outcome_of(request.features, decision, completion, self._specs[completion.replica].method)
            member.policy.observe(replace(outcome, shadow=self._shadow.of(request)))
            self._finished += 1

    def _run_periodic_work(self) -> None:
        if self._now_s >= self._sync_s:
            self._sync_s = self._now_s + SYNC_S
            for member in self._members:
                member.sync()
        if self._now_s >= self._maintenance_s and self._finished >= self._fitted + MAINTENANCE_REQUESTS:
            self._maintenance_s, self._fitted = self._now_s + MAINTENANCE_S, self._finished
            for member in self._members:
                if (work := member.policy.maintenance()) is not None:
                    work()
        if len(self._members) > 1:
            self._update_loads()

    def _change(self, at_s: float, member: Member, replica: int, by: int) -> None:
        if self._loads == "exchange":
            number = next(number for number, each in enumerate(self._members) if each is member)
            heapq.heappush(self._changes, (at_s + EXCHANGE_S, number, replica, by))

    def _update_loads(self) -> None:
        """Set the loads that each gateway knows; with `exchange` as in `Pool.set_peers_in_flight`."""
        while self._changes and self._changes[0][0] <= self._now_s:
            _, number, replica, by = heapq.heappop(self._changes)
            self._published[number][replica] += by
        is_report = self._now_s >= self._report_s
        if is_report:
            self._report_s = self._now_s + REPORT_S
        for index in range(len(self._specs)):
            total = sum(member.replicas[index].in_flight for member in self._members)
            published = sum(counts[index] for counts in self._published)
            for number, member in enumerate(self._members):
                view = member.replicas[index]
                others = total - view.in_flight
                if self._loads == "exchange":
                    peers = published - self._published[number][index]
                    if is_report:
                        self._foreign[number][index] = max(0, others - peers)
                    others = self._foreign[number][index] + peers
                elif self._loads == "reports" and not is_report:
                    continue
                view.load = EngineLoad(running=total, others=others, at_s=math.inf)


def members(specs: Sequence[ReplicaSpec], count: int, seed: int, stores: Callable[[], Store] | None) -> list[Member]:
    """Return untrained gateways, with a store if they share their observations."""
    gateways = []
    for number in range(count):
        policy = Learned(LearnedSettings(seed=10 * seed + number))
        views = [ReplicaView(spec.name, spec.method, draft_schedule(spec.method, spec.config)) for spec in specs]
        member = Member(policy, views)
        if stores is not None:
            member.ledger, member.store = Ledger("m", policy.statistics, uuid4().hex), stores()
        gateways.append(member)
    return gateways


def play(ground: Ground, task: Task, stores: Callable[[], Callable[[], Store]]) -> dict[str, dict[str, float]]:
    """Return the logarithm of the mean time of each part, for each setup with the same arrivals."""
    prepare(ground, task.pool)
    specs = pool_of(task.pool)
    requests = timed(ground, task, drawn(ground.requests, task.mix, REQUESTS, Random(task.seed)))
    trained = members(specs, 1, task.seed, None)
    set_learned(trained[0].policy, ground.warm[task.pool], time.time())
    setups = {
        "trained": (trained, "exact"),
        "one": (members(specs, 1, task.seed, None), "exact"),
        "three, exact": (members(specs, 3, task.seed, stores()), "exact"),
        "three, exchange": (members(specs, 3, task.seed, stores()), "exchange"),
        "three that do not share, exact": (members(specs, 3, task.seed, None), "exact"),
        "three, reports": (members(specs, 3, task.seed, stores()), "reports"),
    }
    logs = {}
    for name, (gateways, loads) in setups.items():
        e2e_s = Simulation(specs, gateways, task.seed, loads).play(requests)
        logs[name] = {part: math.log(e2e_s[which].mean()) for part, which in PARTS.items()}
        for member in gateways:
            if member.store is not None:
                member.store.close()
    return logs


def report(runs: Sequence[dict[str, dict[str, float]]]) -> None:
    """Print the table."""
    print("| requests | gateways | over one gateway | regret over trained |\n|---|---|---|---|")
    for part in PARTS:
        for name in runs[0]:
            if name == "trained":
                continue
            cells = []
            for other in ("one", "trained"):
                logs = [run[name][part] - run[other][part] for run in runs]
                margin = 1.96 * stdev(logs) / math.sqrt(len(logs))
                cells.append(f"{math.expm1(fmean(logs)):+.1%} ±{margin:.1%}")
            print(f"| {part} | {name} | {cells[0] if name != 'one' else ''} | {cells[1]} |")


def main() -> None:
    """Play all runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--redis", help="URL of the Redis to share through; default: an SQLite file")
    parser.add_argument("--pool", choices=list(POOLS), default="b/n/s/e")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    ground = ground_of(arguments.folder, None, False)
    with tempfile.TemporaryDirectory() as folder:

        def stores() -> Callable[[], Store]:
            name = uuid4().hex
            if arguments.redis:
                return lambda: RedisStore(arguments.redis, f"shared-learning-{name}")
            return lambda: SqliteStore(Path(folder) / f"{name}.sqlite")

        tasks = [
            Task(arguments.pool, mix, load, "poisson", seed)
            for mix in MIXES
            for load in LOADS
            for seed in range(arguments.seeds)
        ]
        report([play(ground, task, stores) for task in tasks])


if __name__ == "__main__":
    main()
