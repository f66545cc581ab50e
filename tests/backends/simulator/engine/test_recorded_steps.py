"""The step rules on random workloads do what they did when they were written a second time, independently.

`recorded_steps.json` was made with an interpreted implementation of the rules, which the project had beside the
compiled one; both agreed in every fact of every step. Workloads with a schedule of k were recorded anew with the
compiled one when a scheduled k came to take effect one step later, as in vLLM; tests by hand are in test_engine.py.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from backends.calibration.parameters import EngineParameters
from backends.draft_schedule import k_by_batch
from backends.drafting.script import Script, block_hashes
from tests.backends.simulator.engine.fleets import engine_of
from tests.support.step_time import DRAFTING, STEP

RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("recorded_steps.json").read_text())


class Draws(Random):
    """Draws that no version of Python changes: all come from `random()`."""

    def below(self, bound: int) -> int:
        return int(self.random() * bound)

    def between(self, least: int, most: int) -> int:
        return least + self.below(most - least + 1)


def parameters(draws: Draws) -> EngineParameters:
    k = draws.below(6)
    drafting = DRAFTING.model_copy(update={"parallel": draws.random() < 0.5})
    return EngineParameters(
        STEP,
        drafting,
        k=k,
        k_by_batch=k_by_batch([[1, 2, k], [3, 5, 1]], k) if k and draws.random() < 0.5 else (),
        max_num_seqs=draws.between(2, 12),
        max_num_batched_tokens=draws.between(8, 120),
        kv_blocks=draws.between(14, 60),
        prefix_caching=draws.random() < 0.8,
    )


def script(draws: Draws, k: int) -> Script:
    prompt, output = draws.between(1, 110), draws.between(1, 80)
    emitted = np.array([1] + [min(draws.between(1, k + 1), output - at) for at in range(1, output)], np.int32)
    drafted = np.array([0] + [max(int(emitted[at]) - 1, draws.below(k + 1)) for at in range(1, output)], np.int32)
    head = draws.below(min(prompt, 80) + 1)  # tokens that it shares with others of the same beginning
    tokens = [draws.below(3), *range(head), *(draws.between(1000, 9000) for _ in range(prompt + output))]
    return Script(
        prompt, output, emitted, drafted, block_hashes(tokens[: prompt + output]) if draws.random() < 0.8 else ()
    )


def play(seed: int) -> dict[str, Any]:
    """Return what happens in a workload: a digest of every step, the clock, and the counters at the end."""
    draws = Draws(seed)
    limits = parameters(draws)
    fleet = engine_of(limits)
    [replica] = fleet.replicas
    now_s, clocks_s, arrives_s, left, last = 0.0, 0.0, 0.0, 40, -1
    digest = sha256()
    while True:
        while left and arrives_s <= now_s:
            last = fleet.submit_script(0, script(draws, limits.k), arrives_s)
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
