"""One run of arrivals, played with every policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.routing.ground import POOLS, Ground, Task, bare, pool_of, prepare, run_of, teach
from lab.simulation.simulate import replay
from policies.balancing.round_robin import RoundRobin
from policies.balancing.static import Static, StaticSettings
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings, Objective
from policies.policy import Policy, PolicySettings
from policies.rules.policy import Thresholds

SLO_SHARE = 1 / 3
"""Share of requests with an SLO."""


class Greedy(Learned):
    """`learned`, except that each request goes where it is fastest itself: the delay of others weighs nothing."""

    name = "greedy"

    def __init__(self, settings: LearnedSettings) -> None:
        super().__init__(settings)
        self.sum._others = 0.0


def makers(ground: Ground, task: Task) -> dict[str, Callable[[], Policy | None]]:
    """Return a function per policy that makes a new instance."""
    seed = task.seed

    def warm() -> Learned:
        policy = Learned(LearnedSettings(seed=seed))
        teach(policy, ground.warm[task.pool])
        return policy

    factories: dict[str, Callable[[], Policy | None]] = {
        "least_loaded": lambda: bare("least_loaded", seed),
        "round_robin": lambda: RoundRobin(PolicySettings()),
        "thresholds": lambda: bare("thresholds", seed),
        "greedy": lambda: Greedy(LearnedSettings(seed=seed)),
        "learned": lambda: bare("learned", seed),
        "learned warm": warm,
        "distilled": lambda: Thresholds(ground.distilled[task.pool].model_copy(update={"seed": seed})),
        "oracle": lambda: None,
    }
    for method in sorted({method for method, _ in POOLS[task.pool][1]}):
        factories[f"all to {method}"] = lambda method=method: Static(  # type: ignore[misc]
            StaticSettings(method=method, seed=seed)
        )
    return factories


def play(ground: Ground, task: Task) -> dict[str, dict[str, float]]:
    """Play one run of arrivals with every policy; return the figures of each policy."""
    prepare(ground, task.pool)
    requests, warmup = run_of(ground, task)
    factories = makers(ground, task)
    factories["learned goodput"] = lambda: Learned(LearnedSettings(seed=task.seed, objective=Objective.GOODPUT))
    plain = replay(pool_of(task.pool), requests, factories["least_loaded"](), seed=task.seed, warmup=warmup)
    bound_s = float(np.nanmedian(plain.tpot_s))
    has_slo = np.random.default_rng(task.seed).random(len(requests)) < SLO_SHARE
    requests = [
        replace(request, features=replace(request.features, slo_tpot_s=bound_s)) if with_slo else request
        for request, with_slo in zip(requests, has_slo, strict=True)
    ]
    figures = {}
    for name, make in factories.items():
        played = replay(pool_of(task.pool), requests, make(), seed=task.seed, warmup=warmup)
        figures[name] = {
            "mean": float(played.e2e_s.mean()),
            "p99": float(np.percentile(played.e2e_s, 99)),
            "ttft": float(played.ttft_s.mean()),
            "tpot": float(np.nanmean(played.tpot_s)),
            "kept": float((~(played.tpot_s > bound_s))[has_slo[warmup:]].mean()),
        }
    return figures
