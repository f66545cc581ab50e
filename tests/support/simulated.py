"""A policy in a closed loop with simulated replicas, in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from backends.calibration.load import load_calibration
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.speculation import Method
from benchmarks import virtual_time
from benchmarks.virtual_time import Call
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Decision, Policy

CALIBRATION = "llama-3.1-8b-h100"

FOUR = (
    ("b", Method.BASELINE, 0),
    ("n", Method.NGRAM, 5),
    ("s", Method.SUFFIX, 24),
    ("e", Method.EAGLE3, 3),
)


def replicas(calibration: str = CALIBRATION, *parts: tuple[str, Method, int]) -> list[SimulatedReplica]:
    """Return the replicas given by `parts` (name, method, k); by default `FOUR`."""
    known = load_calibration(calibration)
    return [
        SimulatedReplica(name, known, method, {"num_speculative_tokens": k} if k else None)
        for name, method, k in parts or FOUR
    ]


def slowed(replica: SimulatedReplica, times: float) -> SimulatedReplica:
    """Return a copy of a replica whose steps take `times` as long."""
    step = replica.parameters.step
    slow = step.model_copy(update={"base_s": times * step.base_s, "overhead_s": times * step.overhead_s})
    parameters = replace(replica.parameters, step=slow)
    (intact,) = replicas("llama-3.1-8b-h100", (replica.name, replica.method, replica.num_speculative_tokens))
    return SimulatedReplica(
        replica.name, intact._calibration, replica.method, intact._config, parameters=parameters, weight=replica.weight
    )


def calls(count: int, per_s: float, seed: int, workloads: tuple[str, ...] = ("code", "chat")) -> list[Call]:
    """Return requests with Poisson arrivals, whose templates differ in the length of their answers."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / per_s, count))
    drawn = []
    for number in range(count):
        kind = int(rng.integers(len(workloads)))
        template = int(rng.integers(4))
        drawn.append(
            Call(
                float(at_s[number]),
                RequestFeatures(
                    "m",
                    Endpoint.CHAT,
                    temperature=0.0,
                    workload=workloads[kind],
                    template=f"{kind}{template}",
                    prompt_tokens=int(rng.integers(50, 1200)),
                ),
                max(2, int(np.exp(rng.normal(math.log(60 + 60 * template), 0.4)))),
            )
        )
    return drawn


def play(
    policy: Policy, pool: list[SimulatedReplica], requests: list[Call], *, maintenance: int = 25
) -> list[Decision]:
    """Send requests by a policy and run the pool until all have ended; return the decision for each request."""
    _, decisions = virtual_time.play(policy, Fleet(pool), requests, maintenance)
    return decisions
