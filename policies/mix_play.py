"""A part of a trace played on a mix of simulated replicas, in virtual time, with the policy in the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from backends.simulator.calibration import load_calibration
from backends.simulator.parameters import EngineParameters
from backends.simulator.script import BLOCK_TOKENS
from backends.simulator.virtual_time import Arrival, run_fleet
from policies.logged import features_of
from policies.mixes import Kind, Mix
from policies.policy import Decision, PolicySettings, policies
from policies.replay import outcome_of
from policies.replay_request import engine_blocks
from policies.request import RequestFeatures
from policies.trace import TraceRecord

Floats = npt.NDArray[np.float64]

_UPKEEP_S = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace, ready to be played; `arrived_s` counts from the beginning of its part."""

    arrived_s: float
    features: RequestFeatures
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Played:
    """What became of each request, in order of arrival, shape (requests,) each; `tpot_s` is NaN for a single token."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats


def requests_of(records: Sequence[TraceRecord], rate: float | None, speed: float) -> list[Request]:
    """Return the requests of a part of a trace.

    Parameters
    ----------
    rate
        Requests a second, evenly spread; None takes the trace's own times.
    speed
        How many times as fast as in the trace they come.

    Raises
    ------
    ValueError
        If the trace has no times and no rate is given.
    """
    found = []
    first = next((record.arrived_at for record in records if record.arrived_at is not None), None)
    for number, record in enumerate(records):
        if rate is not None:
            at_s = number / rate
        elif record.arrived_at is None or first is None:
            raise ValueError("the trace does not tell when requests came; give a rate")
        else:
            at_s = (record.arrived_at - first) / speed
        found.append(
            Request(max(0.0, at_s), features_of(record), max(1, record.output_tokens or 1), engine_blocks(record))
        )
    return found


def play(
    calibration: str,
    kinds: Sequence[Kind],
    mix: Mix,
    policy: str,
    settings: PolicySettings,
    part: Sequence[Request],
    seed: int,
) -> Played:
    """Play a part of a trace until all its requests have finished; the same seed gives the same luck to every mix."""
    from backends.simulator.fleet import Completion, Fleet, Replica  # compiled: only whoever plays need load it

    known = load_calibration(calibration)
    replicas = []
    for number, place in enumerate(mix):
        kind = kinds[place]
        parameters = EngineParameters.of(known, kind.method, kind.config)
        parameters = replace(parameters, kv_blocks=max(1, kind.fit.tokens // BLOCK_TOKENS))
        replicas.append(Replica(f"{kind.method}-{number}", known, kind.method, kind.config, parameters=parameters))
    fleet = Fleet(replicas, seed)
    places = {replica.name: number for number, replica in enumerate(replicas)}
    router = policies()[policy](settings)
    now_s = 0.0
    router.set_clock(lambda: now_s)
    sent: list[tuple[RequestFeatures, Decision]] = []
    next_upkeep_s = _UPKEEP_S

    def choose(arrival: Arrival) -> int:
        nonlocal now_s, next_upkeep_s
        now_s = arrival.arrived_s
        while now_s >= next_upkeep_s:
            next_upkeep_s = now_s + _UPKEEP_S
            if (work := router.upkeep()) is not None:
                work()
        features = replace(part[len(sent)].features, in_flight=sum(replica.in_flight for replica in replicas))
        decision = router.choose(features, replicas)
        sent.append((features, decision))
        return places[decision.backend]

    def observe(completion: Completion) -> None:
        features, decision = sent[completion.request_id]
        router.observe(outcome_of(features, decision, completion, replicas[completion.replica].method))

    arrivals = (
        Arrival(
            one.arrived_s, max(1, one.features.prompt_tokens), one.output_tokens, one.features.workload or "chat",
            one.features.temperature,
            one.prefix_blocks,
        )
        for one in part
    )  # fmt: skip
    timeline = run_fleet(fleet, arrivals, choose, observe)
    return Played(timeline.ttft_s, timeline.tpot_s, timeline.e2e_s)
