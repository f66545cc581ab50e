"""Whether three gateways learn as fast as one: `python -m benchmarks.shared_learning FOLDER [--redis URL] [--seeds N]`.

The ground is that of `benchmarks.routing` (see there for FOLDER), in virtual time: the same arrivals at the same
replicas, once all through one gateway, and once drawn at random through three, each with a `learned` of its own. These
share what they observe through a store, a real one, as the gateway does (`gateway.state.ledger`): an SQLite file, or
Redis. They exchange once a virtual second, fit as often as one gateway does, and each sees exactly what it has in
flight itself.

What the others have in flight a gateway knows from the engines' reports, up to two seconds old. That is no matter of
learning, and costs by itself; so it is played twice, as it is (`reports`), and with others' requests known exactly
(`exact`). Shown is the mean time to finish, as geometric means over mixes and loads, with intervals over all runs: over
that of one gateway; and of each the regret, over that of one gateway that was trained on other requests before.
"""

from __future__ import annotations

import argparse
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
from backends.simulator.engine.fleet import Fleet, Replica
from backends.speculation import Method
from benchmarks.routing_ground import POOLS, Ground, Task, drawn, ground_of, pool_of, prepare, timed
from gateway.state.ledger import Ledger
from gateway.state.redis import RedisStore
from gateway.state.sqlite import SqliteStore
from gateway.state.store import Store
from lab.replay.request import ReplayRequest
from lab.replay.simulate import ReplicaSpec, TextLookups, outcome_of, set_learned
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Decision

REQUESTS = 2000
PARTS = {"1 to 250": slice(250), "251 to 1,000": slice(250, 1000), "1,001 to 2,000": slice(1000, 2000)}
MIXES = ("even", "templates")
LOADS = (0.25, 0.75)
SYNC_S = 1.0
UPKEEP_S = 0.5
UPKEEP_REQUESTS = 50
REPORT_S = 2.0


@dataclass(slots=True)
class Seen:
    """A replica as one of several gateways sees it (a `backends.backend.Candidate`)."""

    name: str
    method: Method
    num_speculative_tokens: int
    weight: float = 1.0
    in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)


@dataclass(slots=True)
class Member:
    """One gateway, as far as it matters here."""

    policy: Learned
    replicas: list[Seen]
    ledger: Ledger | None = None
    store: Store | None = None
    under_way: dict[int, tuple[int, ReplayRequest, Decision]] = field(default_factory=dict)

    def sync(self) -> None:
        """Exchange with the store what was observed."""
        if self.ledger is not None and self.store is not None:
            self.ledger.stage()
            self.ledger.exchange(self.store)
            self.ledger.settle()


class Playing:
    """Arrivals at a pool behind several gateways.

    Parameters
    ----------
    exact
        Whether each gateway knows at any time what the others have in flight.
    """

    def __init__(self, specs: Sequence[ReplicaSpec], members: Sequence[Member], seed: int, *, exact: bool) -> None:
        self._specs = specs
        replicas = []
        for one in specs:
            known = load_calibration(one.calibration)
            parameters = EngineParameters.of(known, one.method, one.config)
            replicas.append(Replica(one.name, known, one.method, one.config, parameters=parameters))
        self._fleet = Fleet(replicas, seed)
        self._members = members
        self._exact = exact
        self._rng = Random(seed)
        self._shadow = TextLookups(specs, members[0].policy, seed)
        self._base_s = time.time()  # stores forget pages whose time is over
        self._now_s = self._sync_s = self._upkeep_s = self._report_s = 0.0
        self._finished = self._fitted = 0
        for member in members:
            member.policy.set_clock(lambda: self._base_s + self._now_s)

    def play(self, requests: Sequence[ReplayRequest]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the seconds that each request took."""
        e2e_s = np.zeros(len(requests))
        for number, request in enumerate(requests):
            self._note(request.arrived_s, e2e_s)
            self._now_s = request.arrived_s
            self._keep_up()
            member = self._members[self._rng.randrange(len(self._members))]
            decision = member.policy.choose(request.features, member.replicas)
            place = next(at for at, one in enumerate(self._specs) if one.name == decision.backend)
            spec = self._specs[place]
            script = request.script(spec.method, member.replicas[place].num_speculative_tokens, spec.config)
            assert script is not None
            identity = self._fleet.submit_script(place, script, self._now_s)
            member.under_way[identity] = number, request, decision
            member.replicas[place].in_flight += 1
        self._note(math.inf, e2e_s)
        return e2e_s

    def _note(self, until_s: float, e2e_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        for done in self._fleet.advance(until_s):
            member = next(one for one in self._members if done.request_id in one.under_way)
            number, request, decision = member.under_way.pop(done.request_id)
            member.replicas[done.replica].in_flight -= 1
            e2e_s[number] = done.e2e_s
            outcome = outcome_of(request.features, decision, done, self._specs[done.replica].method)
            member.policy.observe(replace(outcome, shadow=self._shadow.of(request)))
            self._finished += 1

    def _keep_up(self) -> None:
        if self._now_s >= self._sync_s:
            self._sync_s = self._now_s + SYNC_S
            for member in self._members:
                member.sync()
        if self._now_s >= self._upkeep_s and self._finished >= self._fitted + UPKEEP_REQUESTS:
            self._upkeep_s, self._fitted = self._now_s + UPKEEP_S, self._finished
            for member in self._members:
                if (work := member.policy.maintenance()) is not None:
                    work()
        if len(self._members) > 1 and (self._exact or self._now_s >= self._report_s):
            self._report_s = self._now_s + REPORT_S
            for place in range(len(self._specs)):
                total = sum(member.replicas[place].in_flight for member in self._members)
                for member in self._members:
                    seen = member.replicas[place]
                    seen.load = EngineLoad(running=total, others=total - seen.in_flight, at_s=math.inf)


def members(specs: Sequence[ReplicaSpec], count: int, seed: int, stores: Callable[[], Store] | None) -> list[Member]:
    """Return gateways that have learned nothing yet, with a store if they share what they learn."""
    made = []
    for number in range(count):
        policy = Learned(LearnedSettings(seed=10 * seed + number))
        seen = [
            Seen(one.name, one.method, EngineParameters.of(load_calibration(one.calibration), one.method, one.config).k)
            for one in specs
        ]
        member = Member(policy, seen)
        if stores is not None:
            member.ledger, member.store = Ledger("m", policy.statistics, uuid4().hex), stores()
        made.append(member)
    return made


def play(ground: Ground, task: Task, stores: Callable[[], Callable[[], Store]]) -> dict[str, dict[str, float]]:
    """Return the logarithm of the mean time of each part, for each way of serving the same arrivals."""
    prepare(ground, task.pool)
    specs = pool_of(task.pool)
    requests = timed(ground, task, drawn(ground.requests, task.mix, REQUESTS, Random(task.seed)))
    trained = members(specs, 1, task.seed, None)
    set_learned(trained[0].policy, ground.warm[task.pool], time.time())
    ways = {
        "trained": (trained, True),
        "one": (members(specs, 1, task.seed, None), True),
        "three, exact": (members(specs, 3, task.seed, stores()), True),
        "three that do not share, exact": (members(specs, 3, task.seed, None), True),
        "three, reports": (members(specs, 3, task.seed, stores()), False),
    }
    logs = {}
    for name, (those, exact) in ways.items():
        e2e_s = Playing(specs, those, task.seed, exact=exact).play(requests)
        logs[name] = {part: math.log(e2e_s[which].mean()) for part, which in PARTS.items()}
        for member in those:
            if member.store is not None:
                member.store.close()
    return logs


def report(runs: Sequence[dict[str, dict[str, float]]]) -> None:
    """Print a table."""
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
    parser.add_argument("--redis", help="URL of a Redis to share through; by default it is an SQLite file")
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
