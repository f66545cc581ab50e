"""A policy in a closed loop with simulated replicas, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from backends.calibration.load import load_calibration
from backends.simulator.engine.fleet import Completion, Fleet, SimulatedReplica
from backends.speculation import Method
from benchmarks.virtual_time import Arrival, Timeline, run_fleet
from lab.simulation.simulate import outcome_of
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Decision, Policy
from policies.roles import Learner, Maintained

CALIBRATION = "llama-3.1-8b-h100"

FOUR = (
    ("b", Method.BASELINE, 0),
    ("n", Method.NGRAM, 5),
    ("s", Method.SUFFIX, 24),
    ("e", Method.EAGLE3, 3),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A request with its arrival time and the length of its answer."""

    arrived_s: float
    features: RequestFeatures
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()


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
    policy: Policy, pool: list[SimulatedReplica], requests: list[Call], seed: int = 0, *, maintenance: int = 25
) -> tuple[Timeline, list[Decision]]:
    """Send requests by a policy and run the pool until all have ended; fit the policy every `maintenance` requests.

    Returns
    -------
    Timeline
        The course of each request, in order of arrival.
    list of Decision
        The decision for each request, in the same order.
    """
    fleet, index_of = Fleet(pool, seed), {replica.name: index for index, replica in enumerate(pool)}
    now_s = 0.0
    if isinstance(policy, Maintained):
        policy.set_clock(lambda: now_s)
    sent: list[tuple[RequestFeatures, Decision]] = []

    def choose(arrival: Arrival) -> int:
        nonlocal now_s
        now_s = arrival.arrived_s
        if len(sent) % maintenance == 0:
            fit(policy)
        features = requests[len(sent)].features
        sent.append((features, policy.choose(features, pool)))
        return index_of[sent[-1][1].backend]

    def observe(completion: Completion) -> None:
        features, decision = sent[completion.request_id]
        if isinstance(policy, Learner):
            policy.observe(outcome_of(features, decision, completion, pool[completion.replica].method))

    timeline = run_fleet(fleet, _arrivals(requests), choose, observe)
    return timeline, [decision for _, decision in sent]


def fit(policy: Policy) -> None:
    """Run the maintenance of a policy, if it is due."""
    if isinstance(policy, Maintained) and (work := policy.maintenance()) is not None:
        work()


def _arrivals(requests: list[Call]) -> Iterator[Arrival]:
    for call in requests:
        yield Arrival(
            call.arrived_s,
            call.features.prompt_tokens,
            call.output_tokens,
            call.features.workload or "chat",
            call.features.temperature,
            call.prefix_blocks,
        )
