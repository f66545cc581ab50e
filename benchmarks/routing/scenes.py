"""The conditions under which `benchmarks.routing.ablation` plays: pools, requests, and what breaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.backend import Candidate
from backends.calibration.load import load_calibration
from backends.drafter_limit import DrafterLimit
from backends.simulator.engine.replica import SimulatedReplica
from backends.speculation import Method
from benchmarks.routing.ground import COUNTED, POOLS, REPORTED, TUNING, WARMUP, drawn, once, pool_of, read, throughput
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest
from lab.simulation.table import RequestTable, request_table
from lab.trace.read import read_trace
from policies.decision import Decision
from policies.features.request import RequestFeatures
from policies.policy import Policy

Requests = Sequence[ReplayRequest]

TEMPERATURES = (0.0, 0.4, 0.8, 1.0)
SLOWER = 4.0
"""Factor on the step times of a replica that becomes slow."""

POOR = 0.2
"""Share of EAGLE-3's drafts that a head accepts which does not fit its target."""

LOW = [[1, 8, 3], [9, 32, 2], [33, 1024, 0]]
"""A schedule of k by batch size that is far from the best, so that much depends on knowing it."""

RUSH = 1.3
BESIDE_LONG, LONG_SHARE = 4000, 0.02
CONTEXT = 131_072
LIMIT = DrafterLimit(2048)
"""Of EAGLE-3's head in the scenes of `limits`."""
SHORT, LONG = 700, (3000, 8000)
"""Longest prompt of a short request, and bounds of the prompts of a long one: their logarithms are uniform."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A column of the table.

    Attributes
    ----------
    cells
        Mix and load of the runs, in turn.
    kind
        What is special; empty for new prompts on a healthy pool.
    """

    what: str
    pool: str
    cells: tuple[tuple[str, float], ...]
    kind: str = ""


def _cells(mixes: Sequence[str], loads: Sequence[float]) -> tuple[tuple[str, float], ...]:
    return tuple((mix, load) for load in loads for mix in mixes)


_HALF_LOAD = _cells(("even", "templates"), (0.25, 0.5, 0.75))
_ALL = _cells(("even", "code", "chat", "templates"), (0.02, 0.25, 0.5, 0.75, 0.95))
SCENES = {
    "new": Scene("new prompts, 8B", "b/n/s/e", _ALL),
    "warm": Scene("new prompts, 8B, after 3,000 others", "b/n/s/e", _ALL, "warm"),
    "2s/2e": Scene("new prompts, 8B, 2s/2e", "2s/2e", _ALL),
    "70B": Scene("new prompts, 70B", "70B", _ALL),
    "again": Scene("prompts come again", "b/n/s/e", _HALF_LOAD, "again"),
    "hot": Scene("temperatures 0 to 1", "b/n/s/e", _HALF_LOAD, "hot"),
    "poor": Scene("a head that does not fit", "b/n/s/e", _HALF_LOAD, "poor"),
    "slow": Scene("EAGLE-3 becomes slow", "b/n/s/e", _HALF_LOAD, "slow"),
    "silent": Scene("EAGLE-3 falls silent", "b/n/s/e", _HALF_LOAD, "silent"),
    "unlike": Scene("two on L40S", "b/n/s/e", _HALF_LOAD, "unlike"),
    "depth": Scene("k by batch size, after a rush", "b/n/s/e", _cells(("even", "templates"), (0.5, 0.75)), "depth"),
    "clients": Scene("a client for each template", "b/n/s/e", _cells(("templates",), (0.25, 0.5, 0.75)), "clients"),
    "long": Scene("prompts beyond a head's limit", "2s/2e", _cells(("chat",), (0.25, 0.5, 0.75)), "long"),
    "agents": Scene("agents' sessions", "b/n/s/e", (("agents", 0.5), ("agents", 2.0)), "agents"),
}


class Run(NamedTuple):
    """Requests on replicas, of which the first do not count; `slow` is the replica that becomes slow then."""

    specs: list[ReplicaSpec]
    requests: Requests
    warmup: int
    seed: int
    slow: int | None = None


@dataclass(slots=True)
class Stage:
    """The recordings, and what was computed from them."""

    tuning: dict[str, list[ReplayRequest]]
    reported: dict[str, list[ReplayRequest]]
    agents: RequestTable | None = None
    rates: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, agents: Path | None, files: ExitStack) -> Stage:
        """Return the recordings in a folder, and the sessions in another; `files` closes what is opened."""
        table = None
        if agents is not None:
            paths = sorted(agents.glob("*.json.gz"))
            records = [
                one
                for path in paths
                for one in read_trace([path])
                if one.prompt_tokens + (one.output_tokens or 0) <= CONTEXT
            ]
            table = files.enter_context(request_table(records, 0.0))
        return cls(read(folder, TUNING), read(folder, REPORTED), table)

    def run(self, name: str, number: int) -> Run:
        """Return a run of a scene; the number decides everything that is drawn."""
        scene = SCENES[name]
        mix, load = scene.cells[number % len(scene.cells)]
        specs, rng = _specs(scene), Random(number)
        if scene.kind == "long":
            return self.beside_long(scene.pool, LONG_SHARE, load, number)
        if scene.kind == "agents":
            assert self.agents is not None
            sessions = self.agents.in_sessions(load, 1.0, 1, number)
            return Run(specs, sessions, len(sessions) // 5, number)
        if scene.kind == "again":
            chosen, warmup = drawn(self.reported, mix, WARMUP + COUNTED, rng), WARMUP
        else:
            before = once(self.tuning, mix, rng)
            chosen, warmup = before + once(self.reported, mix, rng), len(before)
        loads = np.full(len(chosen), load)
        if scene.kind == "depth":
            loads[:warmup] = RUSH
        requests = self._timed(scene, mix, _changed(scene, specs, chosen, rng, number), loads, number)
        if scene.kind == "silent":
            requests[warmup:] = [thinned(one, 0.0, one.features.temperature) for one in requests[warmup:]]
        slow = [spec.method for spec in specs].index(Method.EAGLE3) if scene.kind == "slow" else None
        return Run(specs, requests, warmup, number, slow)

    def training(self, name: str) -> Run:
        """Return requests of the tuning part for the healthy replicas of a scene, at half load."""
        scene, rng = SCENES[name], Random(99)
        chosen = [one for mix in ("even", "templates") for one in drawn(self.tuning, mix, COUNTED, rng)]
        rng.shuffle(chosen)
        specs = _specs(scene)
        changed = _changed(scene, specs, chosen, rng, 0)
        return Run(specs, self._timed(scene, "even", changed, np.full(len(chosen), 0.5), 99), 0, 99)

    def beside_long(self, pool: str, share: float, load: float, number: int) -> Run:
        """Return short chat requests of which a share is replaced by long ones, on replicas whose heads have a limit.

        A long one has an answer of the recordings, but no text: its acceptance is drawn.
        """
        rng, scene = Random(number), Scene("", pool, ())
        chat = [one for one in self.reported["chat"] if one.prompt_tokens <= SHORT]
        chosen = []
        for _ in range(WARMUP + BESIDE_LONG):
            one = rng.choice(chat)
            if rng.random() < share:
                tokens = round(math.exp(rng.uniform(*map(math.log, LONG))))
                features = replace(one.features, prompt_tokens=tokens)
                one = replace(one, features=features, prompt_tokens=tokens, acceptance={}, text=None, _scripts={})
            chosen.append(one)
        specs = [replace(one, drafter_limit=LIMIT if one.method is Method.EAGLE3 else None) for one in _specs(scene)]
        return Run(specs, self._timed(scene, "chat", chosen, np.full(len(chosen), load), number), WARMUP, number)

    def _timed(
        self, scene: Scene, mix: str, requests: Requests, loads: npt.NDArray[np.float64], seed: int
    ) -> list[ReplayRequest]:
        """Return the requests with the times of a Poisson process."""
        gaps = np.random.default_rng(seed).exponential(1.0, len(requests))
        at_s = np.cumsum(gaps / loads) / self._rate(scene, mix)
        return [replace(request, arrived_s=at) for request, at in zip(requests, at_s.tolist(), strict=True)]

    def _rate(self, scene: Scene, mix: str) -> float:
        """Return the throughput of a healthy pool of the same replicas on the recorded requests."""
        key = scene.kind if scene.kind in ("unlike", "depth") else scene.pool, mix
        if key not in self.rates:
            requests = drawn(self.reported, mix, WARMUP + COUNTED, Random(0))[-COUNTED:]
            self.rates[key] = throughput(_specs(scene), requests)
        return self.rates[key]


def _specs(scene: Scene) -> list[ReplicaSpec]:
    specs = pool_of(scene.pool)
    if scene.kind == "unlike":
        slow = (Method.BASELINE, Method.EAGLE3)
        return [replace(one, calibration="llama-3.1-8b-l40s") if one.method in slow else one for one in specs]
    if scene.kind == "depth":
        config = {**POOLS[scene.pool][1][-1][1], "num_speculative_tokens_per_batch_size": LOW}
        return [replace(one, config=config) if one.method is Method.EAGLE3 else one for one in specs]
    return specs


def _changed(
    scene: Scene, specs: Sequence[ReplicaSpec], requests: Requests, rng: Random, number: int
) -> list[ReplayRequest]:
    """Return the requests as they are in a scene."""
    for request in requests:
        for spec in specs:  # what is made of a request below shares its steps
            request.script(spec.method, spec.config.get("num_speculative_tokens", 0), spec.config)
    if scene.kind == "poor":
        return [thinned(request, POOR) for request in requests]
    if scene.kind == "clients":
        known = [one.features for one in requests]
        named = [replace(each, template="", client=each.template) for each in known]
        return [replace(one, features=each) for one, each in zip(requests, named, strict=True)]
    if scene.kind != "hot":
        return list(requests)
    power = 0.5 if number % 2 else 1.0  # others saw less than the calibration's source
    factors = [factor**power for factor in load_calibration(specs[0].calibration).temperature.factors]
    drawn_at = [rng.randrange(len(TEMPERATURES)) for _ in requests]
    return [
        thinned(request, factors[index], TEMPERATURES[index]) for request, index in zip(requests, drawn_at, strict=True)
    ]


def thinned(request: ReplayRequest, share: float, temperature: float = 0.0) -> ReplayRequest:
    """Return a request of which EAGLE-3's recorded drafts are accepted less often, each token with that probability.

    What n-gram and suffix drafting accept depends on the text alone here, as in the simulator.
    """
    features = replace(request.features, temperature=temperature)
    recorded = np.asarray(request.acceptance[Method.EAGLE3.value])
    if share < 1.0:
        rng = np.random.default_rng([len(recorded), request.prompt_tokens, round(1000 * share)])
        recorded = 1 + np.minimum(recorded - 1, rng.geometric(1.0 - share, len(recorded)) - 1)
    scripts = {key: script for key, script in request._scripts.items() if key[0] != Method.EAGLE3.value}
    return replace(request, features=features, acceptance={Method.EAGLE3.value: recorded.tolist()}, _scripts=scripts)


def break_later(policy: Policy, run: Run) -> None:
    """Slow a replica down once the warm-up has ended; the policy is not told."""
    if run.slow is None:
        return
    choose, left = policy.choose, [run.warmup]
    broken = run.slow

    def choose_and_break(request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        if not left[0]:
            replica = candidates[broken]
            assert isinstance(replica, SimulatedReplica)
            for name in _step_times():
                replica._records[replica._number][name] *= SLOWER
        left[0] -= 1
        return choose(request, candidates)

    policy.choose = choose_and_break  # type: ignore[method-assign]


@cache
def _step_times() -> list[Any]:
    from backends.simulator.engine.state import REPLICA

    return [name for name in REPLICA.names or () if name.endswith("_s") and name not in ("now_s", "step_s")]
