"""What a gateway says of its fleet by formulas, and what a plan says of it by simulation, for one traffic."""

from __future__ import annotations

import numpy as np
import pytest

from backends.backend import Backend
from backends.calibration.load import load_calibration
from backends.speculation import Method
from gateway.rooms.fleet.demand import HOUR_MINUTES, Minute
from gateway.rooms.fleet.model import ModelFleet
from lab.plan.mixes import Mix, kinds, mixes
from lab.plan.planning import loss_of
from lab.plan.result import PlanObjective
from lab.plan.runner import MixRunner, MixTask
from lab.plan.traffic import one_after_another
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest, replay_request
from lab.simulation.simulate import Replayed, replay
from lab.trace.record import TraceRecord
from policies.build import build
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings

CALIBRATION = "llama-3.1-8b-h100"
METHODS = ((Method.BASELINE, (0,)), (Method.NGRAM, (5,)), (Method.SUFFIX, (24,)), (Method.EAGLE3, (3,)))
KINDS = kinds(load_calibration(CALIBRATION), 4096, METHODS)
PRESENT: Mix = tuple(range(len(KINDS)))
WINDOWS, REQUESTS = 5, 400


def traffic(per_s: float) -> list[list[ReplayRequest]]:
    """Return windows of chat at 0.7 and code at 0."""
    rng = np.random.default_rng(0)
    windows = []
    for _ in range(WINDOWS):
        sizes = zip(rng.integers(50, 900, REQUESTS), np.maximum(8, rng.lognormal(5.0, 0.6, REQUESTS)), strict=True)
        chat = rng.random(REQUESTS) < 0.6
        at_s = np.cumsum(rng.exponential(1.0 / per_s, REQUESTS))
        windows.append(
            [
                replay_request(
                    TraceRecord(
                        prompt_tokens=int(prompt),
                        output_tokens=int(output),
                        workload="chat" if is_chat else "code",
                        temperature=0.7 if is_chat else 0.0,
                    ),
                    float(time_s),
                    0.0,
                )
                for (prompt, output), is_chat, time_s in zip(sizes, chat, at_s, strict=True)
            ]
        )
    return windows


@pytest.mark.slow
@pytest.mark.parametrize(("per_s", "tpot_ms"), [(3.0, 30.0), (60.0, 20.0)])
def test_what_a_removal_costs_is_what_a_plan_loses_by_it(per_s: float, tpot_ms: float) -> None:
    settings = LearnedSettings.model_validate(
        {"seed": 0, "calibration": CALIBRATION, "slo": {"ttft_ms": 2000.0, "tpot_ms": tpot_ms}}
    )
    windows = one_after_another(traffic(per_s))
    policy = build("learned", settings)
    assert isinstance(policy, Learned)
    pool = [ReplicaSpec(str(kind.method), kind.method, kind.config, CALIBRATION) for kind in KINDS]
    took_s = float(np.concatenate([replay(pool, window, policy).e2e_s for window in windows]).mean())

    fleet = ModelFleet()
    requests = [request for window in windows for request in window]
    prompt, output = (
        float(np.mean([getattr(one, of) for one in requests])) for of in ("prompt_tokens", "output_tokens")
    )
    count = 60.0 * per_s
    minute = Minute(count, count * prompt, count * output, count * output, count, count * took_s)
    fleet.minutes.extend([minute] * HOUR_MINUTES)
    backends = [Backend(kind.method, "m", kind.method, "http://a", num_speculative_tokens=kind.k) for kind in KINDS]
    fleet.update(policy, [(each.method.value, each) for each in backends], 0.0)
    assert fleet.missing == ""
    counts, seconds, then_s = fleet.advised
    advised: Mix = tuple(index for index in PRESENT for _ in range(counts[KINDS[index].method.value]))
    assert 0 < len(advised) < len(PRESENT)
    assert seconds == pytest.approx(took_s)

    runner = MixRunner(CALIBRATION, tuple(KINDS), "learned", settings, windows)
    counted = tuple(range(1, WINDOWS))

    def played(mix: Mix) -> list[Replayed]:
        runs = [runner(MixTask(mix, counted, (0,), 0))]
        return [one for window in zip(*runs, strict=True) for one in window]

    there = played(advised)
    assert PlanObjective({"ttft": 2.0, "tpot": tpot_ms / 1e3}).value(there) > 0.98
    loss = loss_of(played(PRESENT), there, PlanObjective())
    assert loss is not None
    assert then_s / seconds - 1.0 == pytest.approx(loss.value, abs=0.1)
    # Of as many of the present replicas, no others are much faster by simulation.
    others = [
        mix for mix in mixes({each: KINDS[each].method for each in PRESENT}, len(advised)) if len(set(mix)) == len(mix)
    ]
    best = min(PlanObjective().value(runner(MixTask(mix, counted[:2], (0,), 0))) for mix in others)
    assert PlanObjective().value(runner(MixTask(advised, counted[:2], (0,), 0))) <= 1.05 * best
