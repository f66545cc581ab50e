"""The step rules on random workloads do what they did when they were written a second time, independently.

`recorded_steps.json` was made with an interpreted implementation of the rules, which the project had beside the
compiled one; both agreed in every fact of every step. Workloads with a schedule of k were recorded anew with the
compiled one when a scheduled k came to take effect one step later, as in vLLM; a test by hand is in test_engine.py.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.backends.simulator.engine.fleets import engine_of
from tests.backends.simulator.engine.workloads import Draws, drawn_parameters, drawn_request

RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("recorded_steps.json").read_text())


def play(seed: int) -> dict[str, Any]:
    """Return what happens in a workload: a digest of every step, the clock, and the counters at the end."""
    draws = Draws(seed)
    limits = drawn_parameters(draws)
    fleet = engine_of(limits)
    [replica] = fleet.replicas
    now_s, clocks_s, arrives_s, left, last = 0.0, 0.0, 0.0, 40, -1
    digest = sha256()
    while True:
        while left and arrives_s <= now_s:
            last = fleet.submit_script(0, drawn_request(draws, limits.k), arrives_s)
            left, arrives_s = left - 1, arrives_s + draws.random() * 0.1
        step = fleet.step(now_s)
        counters, load = fleet.counters(), replica.report(now_s)
        state = [load.running, load.waiting, round(load.kv_usage * limits.kv_blocks)]
        state += [*map(int, astuple(counters)[1:]), *counters.accepted_at.tolist()]
        if step is None:
            digest.update(repr(state).encode())
            if not left:
                break
            now_s = arrives_s
            continue
        emissions = [
            (each.request_id, each.tokens, each.drafted, int(each.sent == each.tokens), int(not each.left))
            for each in step.emissions
        ]
        facts = [emissions, list(map(tuple, step.admitted)), step.k, step.batch_tokens, step.context_tokens, *state]
        digest.update(repr(facts).encode())
        now_s += step.duration_s
        clocks_s += now_s
        if draws.random() < 0.02:
            fleet.cancel(draws.between(0, last))
    assert replica.in_flight == 0
    totals = dict(zip(list(counters.__dataclass_fields__)[1:], map(int, astuple(counters)[1:]), strict=True))
    return {"seed": seed, "end_s": now_s, "clocks_s": clocks_s, "digest": digest.hexdigest(), **totals}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: str(recorded["seed"]))
def test_workloads_are_played_as_recorded(recorded: dict[str, Any]) -> None:
    played = play(recorded["seed"])
    times = {name: pytest.approx(recorded[name], rel=1e-9) for name in ("end_s", "clocks_s")}
    assert played == recorded | times
