"""Score comparisons of arms against the truth: `python -m benchmarks.routing.compare FOLDER [--cells C]`.

Two arms of two replicas each serve recorded requests side by side for two hours of virtual time, by
`policies.experiment` (see `benchmarks.routing` for FOLDER). The truth is the mean time of the same arrivals wholly
under the one arm, over that wholly under the other; that of a crossing, the load at which steady arrivals take equally
long. What users lose is the mean time of requests while it compares, over that of the same arrivals without.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from backends.backend import Candidate
from backends.calibration.load import load_calibration
from backends.speculation import Method
from benchmarks.routing.ground import COUNTED, WORKLOADS, Ground, OnGround, bare, options
from benchmarks.routing.worlds import POOL_OF, World, specs_of
from benchmarks.table import head, row
from gateway.rooms.compare.definition import MANY, block_for, longer_block_s
from lab.parallel import all_cores
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import Replayed, replay
from policies.decision import Outcome
from policies.experiment.curve import Crossing, Point
from policies.experiment.evidence import BLOCKS, Evidence
from policies.experiment.experiment import Experiment
from policies.experiment.plan import Plan
from policies.experiment.verdict import SHOWN, Stage, verdict_of
from policies.features.request import RequestFeatures
from policies.policy import Decision, Policy
from policies.roles import Learner, Maintained, Work
from policies.statistics import Statistics

ARMS: Final = "a", "b"
REPLICAS: Final = 2
"""Of each arm."""
BEGAN_S: Final = 1e6
"""Times the seed, when a run begins, so that its blocks come in another order."""
CHANCE: Final = 1_000_000
"""Seed of the arms that requests are given to, which must not be that of the requests."""
UNTIL: Final = 0.02
BEFORE: Final = 1000
"""Requests before a comparison."""
STEADY: Final = 10_000
"""Requests that show the truth where the traffic does not change."""
DAY_SWING: Final = 0.6
HEAVY: Final = 3.0
"""Factor on the time of a pass of the head that pays at low load only."""
FAILS_S: Final = 240.0, 840.0
"""When a replica fails and when it is back; what is in flight there is lost."""
SESSIONS: Final = 16
TOKENS: Final = {"long": 1000, "cancels": 16}
"""Of the answers that a client asks for on the first arm."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Two arms in a situation.

    Parameters
    ----------
    pair
        What is compared: a number is by how much longer the steps of the second arm take, `head` and `suffix` are
        without speculation against it in a world of each run (`benchmarks.routing.worlds`), `crossing` one whose head
        pays at low load only.
    mix
        `even`, or `drifting` from chat to code; a world has its own.
    arrivals
        `poisson`, `azure` for the gaps of its trace, or `day` for a rate that goes up and down once.
    trouble
        What goes on besides: see `Compared`.
    """

    pair: float | str
    mix: str = "even"
    arrivals: str = "poisson"
    trouble: str = ""
    policy: str = "least_loaded"
    runs: int = 40
    rate: float = 10.0
    hours: float = 2.0
    shape: tuple[int, int] = (REPLICAS, REPLICAS)
    usual: bool = True  # whether there are blocks of time as usual

    @property
    def is_world(self) -> bool:
        """Whether each run has two arms of its own."""
        return self.pair in ("head", "suffix")

    @property
    def is_steady(self) -> bool:
        """Whether the traffic is the same all the time."""
        return self.arrivals == "poisson" and self.mix == "even"

    def plan(self, seed: int, block_s: float, before: Plan | None = None) -> Plan:
        """Return what is compared."""
        names = [f"{arm}{at}" for at, arm in enumerate(self.shape[0] * ARMS[:1] + self.shape[1] * ARMS[1:])]
        groups = tuple(frozenset(name for name in names if name.startswith(arm)) for arm in ARMS)
        return Plan(f"run {seed} {block_s:g}", ARMS, groups, block_s=block_s, usual=self.usual, before=before)


@dataclass(slots=True)
class Run:
    """What a run showed."""

    block_s: float
    looks: dict[int, Point]  # at 95%, by the last of the blocks that they go by
    stage: Stage  # with which it first could end
    better: str
    ended_s: float
    crossing: Crossing | None
    lost: float  # mean time until it could end over that without comparing
    covers_cost: bool  # whether what it says that comparing costs is so


class Compared(Policy, Learner, Maintained):
    """Compares two arms, within each of which a policy chooses, and plays the trouble of a cell.

    `conversations` have eight turns in the mean; of `sessions` there are 16 all the time, each of its own kind of work,
    which a head drafts; `gateways`: there are two; `fails`: a replica of the first arm is away
    for ten minutes; `repeats`: half of the requests are one prompt; `long`: a client with half of the requests sends
    long ones wherever it finds itself on the first arm; `cancels`: it leaves the first arm after 16 tokens.
    """

    name = "compared"

    def __init__(self, cell: Cell, seed: int, requests: Sequence[ReplayRequest], block_s: float) -> None:
        self.policy = bare(cell.policy, seed)
        super().__init__(self.policy.settings)
        self.reads_requests, self.prices_limits = True, self.policy.prices_limits
        self.cell, self.seed, self.first_block_s, self.requests = cell, seed, block_s, requests
        self.now_s: Callable[[], float] = lambda: 0.0
        self.began_s = requests[0].arrived_s
        self.number = self.block = -1
        self.sent: dict[int, Experiment] = {}
        self.looks: dict[int, Point] = {}
        self.ended: tuple[Stage, str, float] | None = None
        self.usual: list[bool] = []  # of each request, whether it came in a block as usual
        self.plan = cell.plan(seed, block_s)
        count = 2 if cell.trouble == "gateways" else 1
        self.statistics = [Statistics([BLOCKS], lambda: self.now_s()) for _ in range(count)]  # noqa: PLW0108
        self.experiments = [Experiment(self.plan, each, CHANCE - seed - at) for at, each in enumerate(self.statistics)]

    def evidence(self) -> Evidence:
        """Return what the gateways show, which tell each other."""
        one, other = self.statistics[0], self.statistics[-1]
        for table, epoch in other.take_changed() if other is not one else ():
            one.set_others_of(table, epoch, {each.key: each.sums for each in other.own_of(table, epoch)})
        return Evidence(self.plan, one)

    def look(self) -> None:
        """Look at what was found so far; go on with longer blocks if they turn out to be too short."""
        evidence = self.evidence()
        if (block_s := longer_block_s(self.experiments[0], evidence)) is not None:
            before = self.plan if len(evidence.blocks) >= MANY else None
            self.plan = self.cell.plan(self.seed, block_s, before)
            for each in self.experiments:
                each.go_on(self.plan)
            return
        found = evidence.fit(*ARMS)
        if found is None:
            return
        plan, number = self.plan.of_block(max(evidence.blocks))
        seen_s = (number + 1) * plan.block_s - self.began_s
        self.looks[max(0, round(seen_s / self.first_block_s) - 1)] = found.overall(SHOWN)
        if self.ended is None:
            verdict = verdict_of(evidence, UNTIL)
            if verdict.stage is not Stage.RUNNING:
                better = verdict.findings[0].better if verdict.findings else ""
                better = ARMS[1 - ARMS.index(verdict.harmed)] if verdict.harmed else better
                self.ended = verdict.stage, better, self.now_s() - self.began_s

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose a candidate in an arm."""
        self.number += 1
        if (block := int(self.now_s() // self.plan.block_s)) != self.block:
            self.block = block
            self.look()
        self.usual.append(self.plan.shares(int(self.now_s() // self.plan.block_s)) is None)
        if self._fails():
            candidates = [each for each in candidates if each.name != "a0"]
        gateway = self.experiments[self.number % len(self.experiments)]
        decision = self.policy.choose(request, gateway.give(request, candidates).candidates)
        if self.number % 2 and decision.backend.startswith("a"):
            changed = self.requests[self.number]
            changed.output_tokens = TOKENS.get(self.cell.trouble, changed.output_tokens)
        self.sent[id(request)] = gateway
        return decision

    def _fails(self) -> bool:
        began_s, ended_s = FAILS_S
        return self.cell.trouble == "fails" and began_s <= self.now_s() - self.began_s < ended_s

    def observe(self, outcome: Outcome) -> None:
        """Add a finished request."""
        if outcome.decision.backend == "a0" and self._fails():
            outcome = replace(outcome, status=502, output_tokens=0)
        elif outcome.output_tokens == TOKENS.get(self.cell.trouble):
            outcome = replace(outcome, status=499 if self.cell.trouble == "cancels" else 200)
        self.sent.pop(id(outcome.request)).observe(outcome)
        if isinstance(self.policy, Learner):
            self.policy.observe(outcome)

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock."""
        self.now_s = clock
        if isinstance(self.policy, Maintained):
            self.policy.set_clock(clock)

    def maintenance(self) -> Work | None:
        """Return background work of the policy."""
        return self.policy.maintenance() if isinstance(self.policy, Maintained) else None


def arms_of(ground: Ground, cell: Cell, world: World) -> list[ReplicaSpec]:
    """Return a replica of each arm."""
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        if cell.is_world:
            others = world.requests(ground.others, COUNTED, Random(world.seed))
            specs = specs_of(world.calibration(folder), others, POOL_OF[world.target])
            arms = [specs["b"], specs["E" if cell.pair == "head" else "s"]]
        else:
            known = replace(world, target="8B", head_pass=HEAVY).calibration(folder)
            head = ReplicaSpec("head", Method.EAGLE3, {"num_speculative_tokens": 5}, known)
            arms = [head if cell.trouble == "sessions" else ReplicaSpec("plain", Method.BASELINE, {}, known)]
            if cell.pair == "crossing":
                arms.append(head)
            else:
                arms.append(replace(arms[0], calibration=_slower(Path(known), 1.0 + float(cell.pair))))
        for each in arms:
            load_calibration(each.calibration)  # it is kept
    return arms


def _slower(known: Path, factor: float) -> str:
    document = json.loads(known.read_text(encoding="utf-8"))
    for name in [name for name in document["step"] if name.endswith("_s")]:
        document["step"][name] *= factor
    path = known.with_suffix(f".{factor}.yaml")
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def requests_of(ground: Ground, cell: Cell, seed: int, world: World) -> list[ReplayRequest]:
    """Return the arrivals of a run."""
    count, random = int(cell.rate * cell.hours * 3600), Random(seed)
    rng = np.random.default_rng(seed)
    if cell.is_world:
        requests = world.requests(ground.requests, count, random)
    else:
        untold = [[*map(_untold, ground.requests[workload])] for workload in WORKLOADS.values()]
        requests = []
        for number in range(count):
            shift = number / count if cell.mix == "drifting" else 0.5
            requests.append(random.choice(random.choices(untold, (1.0 - shift, shift, 0.25, 0.25))[0]))
    gaps_s = rng.exponential(1.0, count)
    if cell.arrivals == "azure":
        assert ground.gaps_s is not None, "the gaps of Azure's trace are needed: --azure"
        gaps_s = np.resize(np.roll(ground.gaps_s, int(rng.integers(len(ground.gaps_s)))), count)
    elif cell.arrivals == "day":
        gaps_s /= 1.0 - DAY_SWING * np.cos(2.0 * math.pi * np.arange(count) / count)
    at_s = BEGAN_S * (seed + 1) + np.cumsum(gaps_s / gaps_s.mean()) / cell.rate
    if cell.trouble == "repeats":
        requests[1::2] = [requests[0]] * (count // 2)
    timed = [replace(one, arrived_s=at) for one, at in zip(requests, at_s.tolist(), strict=True)]
    if cell.trouble == "sessions":
        for number, one in enumerate(timed):
            like = random.choice(untold[number % SESSIONS % len(untold)])
            features = replace(like.features, prefix=(number, number + SESSIONS))
            timed[number] = replace(like, arrived_s=one.arrived_s, features=features)
    talk: tuple[int, ...] = (0,)
    for number, one in enumerate(timed if cell.trouble == "conversations" else ()):
        # A new one, or a further turn of the last.
        talk = (number + 1,) if random.random() < 1 / 8 else (*talk, -number)
        one.features = replace(one.features, prefix=talk)
    return timed


def _untold(request: ReplayRequest) -> ReplayRequest:
    return replace(request, features=replace(request.features, template="", workload=""))


def _alone(cell: Cell, spec: ReplicaSpec, requests: Sequence[ReplayRequest], seed: int) -> Replayed:
    members = [replace(spec, name=f"{at}") for at in range(2 * REPLICAS)]
    return replay(members, requests, bare(cell.policy, seed), seed=seed)


def members_of(specs: Sequence[ReplicaSpec]) -> list[ReplicaSpec]:
    """Return the replicas of both arms."""
    arms = [(arm, spec) for arm, spec in zip(ARMS, specs, strict=True) for _ in range(REPLICAS)]
    return [replace(spec, name=f"{arm}{at}") for at, (arm, spec) in enumerate(arms)]


def fitting_block_s(cell: Cell, specs: Sequence[ReplicaSpec], requests: Sequence[ReplayRequest], seed: int) -> float:
    """Return the seconds of a block, by the requests before the comparison: see `gateway.rooms.compare`."""
    members = members_of(specs)
    return block_for(float(replay(members, requests[:BEFORE], bare(cell.policy, seed), seed=seed).e2e_s.mean()))


def truth(ground: Ground, cell: Cell, seed: int) -> list[float]:
    """Return the mean time wholly under the first arm over that wholly under the second, after each block."""
    world = World.drawn(seed)
    requests = requests_of(ground, cell, seed, world)[: STEADY if cell.is_steady else None]
    specs = arms_of(ground, cell, world)
    sums = [np.cumsum(_alone(cell, spec, requests, seed).e2e_s) for spec in specs]
    since_s = np.array([each.arrived_s for each in requests]) - requests[0].arrived_s
    block_s = fitting_block_s(cell, specs, requests, seed)
    blocks = 1 + int(cell.hours * 3600 / block_s)
    ends = np.searchsorted(since_s, block_s * np.arange(1, blocks + 1)) - 1
    ratios = sums[0][ends] / sums[1][ends]
    return [float(ratios[-1])] * blocks if cell.is_steady else ratios.tolist()


def true_crossing(ground: Ground, cell: Cell, seed: int) -> float:
    """Return the requests in flight per replica at which steady arrivals take equally long under both arms."""
    world, ratios, loads = World.drawn(seed), [], []
    for rate in np.geomspace(0.3, 2.0, 8) * cell.rate:
        steady = replace(cell, rate=float(rate), arrivals="poisson", hours=5000 / 3600 / float(rate))
        requests = requests_of(ground, steady, seed, world)
        means = [_alone(cell, spec, requests, seed).e2e_s.mean() for spec in arms_of(ground, cell, world)]
        ratios.append(math.log(means[0] / means[1]))
        loads.append(math.log(rate / (2 * REPLICAS) * math.sqrt(means[0] * means[1])))
    return math.exp(float(np.interp(0.0, ratios[::-1], loads[::-1])))


def play(ground: Ground, cell: Cell, seed: int) -> Run:
    """Play a run with and without comparing."""
    world = World.drawn(seed)
    specs = arms_of(ground, cell, world)
    members = members_of(specs)
    requests = requests_of(ground, cell, seed, world)
    usual = None if cell.trouble else replay(members, requests, bare(cell.policy, seed), seed=seed).e2e_s
    block_s = fitting_block_s(cell, specs, requests_of(ground, cell, seed, world)[:BEFORE], seed)
    policy = Compared(cell, seed, requests, block_s)
    compared = replay(members, requests, policy, seed=seed).e2e_s
    usual = compared if usual is None else usual
    policy.look()
    stage, better, ended_s = policy.ended or (Stage.RUNNING, "", cell.hours * 3600)
    arrived_s = np.array([each.arrived_s for each in requests])
    until = arrived_s - arrived_s[0] <= ended_s
    compares = [not each for each in policy.usual]
    evidence = policy.evidence()
    found, cost = evidence.fit(*ARMS), evidence.cost(SHOWN)
    true_cost = compared[compares].mean() / usual[compares].mean()
    is_held = math.isnan(cost.ratio) or bool(cost.low <= true_cost <= cost.high)
    crossing = None if found is None else found.crossing(SHOWN)
    lost = compared[until].mean() / usual[until].mean() - 1.0
    return Run(block_s, policy.looks, stage, better, ended_s, crossing, float(lost), is_held)


def scores(cell: Cell, truths: Sequence[Sequence[float]], runs: Sequence[Run]) -> list[object]:
    """Return the entries of a row."""
    wrong, right, held = 0, 0, []
    for truth_of, run in zip(truths, runs, strict=True):
        true = truth_of[int(run.ended_s // run.block_s)]
        is_named, is_right = run.stage in {Stage.DECIDED, Stage.HARM}, run.better == ("a" if true < 1.0 else "b")
        differs = abs(math.log(true)) > SAME
        right += is_named and is_right if differs else run.stage is Stage.ALIKE
        wrong += is_named and not (differs and is_right)
        held.append([look.low <= truth_of[at] <= look.high for at, look in run.looks.items()])
    ends_s = median(run.ended_s if run.stage is not Stage.RUNNING else math.inf for run in runs)
    last_true = [each[-1] for each in truths]
    losses = [f"{fmean(run.lost for run in runs):+.1%}", sum(run.covers_cost for run in runs)]
    return [
        len(runs),
        f"{min(last_true):.2f} to {max(last_true):.2f}" if cell.is_world else f"{fmean(last_true):.3f}",
        *(wrong, right, sum(run.stage is Stage.ALIKE for run in runs)),
        "" if math.isinf(ends_s) else f"{ends_s / 60:.0f}",
        sum(map(all, held)),
        *([""] * len(losses) if cell.trouble else losses),
    ]


def crossings(cell: Cell, runs: Sequence[Run], true: float) -> str:
    """Return how the crossings that were found compare with the true one, if there is one."""
    found = [run.crossing for run in runs if run.crossing is not None]
    if cell.pair != "crossing":
        return f"{len(found)} found" if found else ""
    within = sum(abs(each.in_flight / true - 1.0) <= NEAR for each in found)
    return f"{true:.1f}: {len(found)} found, {within} within 15%"


COLUMNS: Final = (
    *("pair", "traffic", "runs", "truth", "wrong", "right", "alike", "minutes", "covered at all looks"),
    *("lost", "cost covered", "crossing"),
)
NEAR: Final = 0.15
SAME: Final = 1e-4
"""Logarithm of a ratio below which arms do not differ."""
CELLS: Final[dict[str, Sequence[Cell]]] = {
    "differences": [Cell(0.0, runs=100), Cell(0.02), Cell(0.05, runs=100), Cell(0.2, runs=20)],
    "worlds": [Cell("head"), Cell("suffix")],
    "traffic": [Cell(pair, mix="drifting", arrivals=arrivals) for arrivals in ("azure", "day") for pair in (0.0, 0.05)],
    "trouble": [
        Cell(pair, trouble=trouble)
        for trouble in ("conversations", "gateways", "fails", "repeats", "long", "cancels")
        for pair in (0.0, 0.05)
    ],
    "sessions": [Cell(pair, trouble="sessions") for pair in (0.0, 0.05, 0.2)],
    "learned": [Cell(0.05, policy="learned"), Cell("suffix", policy="learned")],
    "crossing": [Cell("crossing", arrivals=arrivals, rate=14.0) for arrivals in ("poisson", "azure", "day")],
}


def _apply(ground: Ground, job: tuple[Callable[..., object], Cell, int]) -> Any:
    function, cell, seed = job
    return function(ground, cell, seed)


def main() -> None:
    """Play all runs of some cells, and print a table."""
    parser = options(__doc__)
    parser.add_argument("--cells", choices=list(CELLS), action="append", help="only these; may be repeated")
    parser.add_argument("--runs", type=int, help="runs of each cell")
    parser.add_argument("--hours", type=float, default=2.0, help="length of a run")
    arguments = parser.parse_args()
    print(head(*COLUMNS), flush=True)
    truths: dict[Cell, list[list[float]]] = {}
    crossing = math.nan
    with all_cores(OnGround(_apply, arguments.folder, arguments.azure, arguments.tune)) as run_all:
        for chosen in [cell for name in arguments.cells or CELLS for cell in CELLS[name]]:
            cell = replace(chosen, hours=arguments.hours)
            seeds = range(arguments.runs or cell.runs)
            quiet = replace(cell, trouble=cell.trouble if cell.trouble in ("repeats", "sessions") else "")
            if quiet not in truths:
                truths[quiet] = run_all([(truth, quiet, seed) for seed in seeds])
            if cell.pair == "crossing" and math.isnan(crossing):
                crossing = run_all([(true_crossing, cell, 0)])[0]
            runs = run_all([(play, cell, seed) for seed in seeds])
            traffic = ", ".join(filter(None, [cell.mix, cell.arrivals, cell.trouble, cell.policy]))
            print(
                row(cell.pair, traffic, *scores(cell, truths[quiet], runs), crossings(cell, runs, crossing)), flush=True
            )


if __name__ == "__main__":
    main()
