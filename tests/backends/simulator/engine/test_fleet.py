"""Many replicas in virtual time: their completions, their loads, and the draws of requests without a script."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.calibration.calibration import Calibration, ContextShift, Kind, Progress
from backends.calibration.draft_profile import lookup_shares
from backends.calibration.parameters import EngineParameters
from backends.simulator.drafting.acceptance import model_based_replay
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.simulator.engine.state import DRAWN, EXCLUDED
from backends.speculation import Method
from tests.backends.simulator.engine.fleets import H100
from tests.support.drawn import drawn_script
from tests.support.step_time import PLAIN

EAGLE = {"num_speculative_tokens": 3}
SHIFT = ContextShift(
    tokens=(900, 1000, 1800), logit_shifts=((0.5, 0.0), (-0.5, -1.0), (-1.0, -3.0)), known_to_tokens=1, source="made up"
)
NGRAM = {"num_speculative_tokens": 5, "prompt_lookup_max": 4}


def replica(parameters: EngineParameters | None = None, name: str = "a") -> SimulatedReplica:
    return SimulatedReplica(name, H100, Method.BASELINE, parameters=parameters)


def single(method: Method, config: dict[str, Any], calibration: Calibration = H100, seed: int = 0) -> Fleet:
    return Fleet([SimulatedReplica("a", calibration, method, config)], seed)


@pytest.mark.parametrize(
    ("method", "config"), [(Method.EAGLE3, EAGLE), (Method.NGRAM, NGRAM), (Method.SUFFIX, {}), (Method.BASELINE, {})]
)
def test_steps_drawn_on_demand_equal_those_of_the_script(method: Method, config: dict[str, Any]) -> None:
    lengths = [(50, 300), (4000, 40), (1, 1), (200, 800), (16, 2)] * 8
    drawn = single(method, config, seed=11)
    written = single(method, config, seed=11)
    counted = []
    for number, (prompt, output) in enumerate(lengths):
        steps = np.array([DRAWN])
        assert drawn.least_delay(prompt, output, "code", 0.3, np.ones((1, 4)), steps, np.zeros(number, np.int64)) == 0
        counted.append(int(steps[0]))
        assert drawn.submit(0, prompt, output, 0.01 * number, kind="code", temperature=0.3) == number
        script = drawn_script(drawn, number, output, "code", 0.3, prompt)
        written.submit_script(0, script, 0.01 * number)
    ours, theirs = drawn.advance(math.inf), written.advance(math.inf)
    assert ours == theirs
    assert len(ours) == len(lengths)
    assert {done.output_tokens for done in ours} == {output for _, output in lengths}
    assert [done.steps for done in sorted(ours)] == counted


def test_the_least_delay_counts_the_steps_shared_with_requests_in_flight() -> None:
    methods: list[tuple[Method, dict[str, Any]]] = [(Method.BASELINE, {}), (Method.EAGLE3, EAGLE), (Method.SUFFIX, {})]
    parameters = [replace(EngineParameters.of(H100, *how), max_num_seqs=3) for how in methods]  # so that some wait
    pool = [
        SimulatedReplica(str(number), H100, *how, parameters=one)
        for number, (how, one) in enumerate(zip(methods, parameters, strict=True))
    ]
    fleet, rng = Fleet(pool, seed=2), np.random.default_rng(5)
    costs = rng.uniform((5e-3, 1e-4, 1e-7, 1e-5), (1e-2, 5e-4, 5e-7, 5e-5), (3, 4))
    last_steps = np.zeros(400, np.int64)
    in_flight: list[dict[int, float]] = [{}, {}, {}]  # prompt and half of the output by id, of each replica
    chosen_of = []
    for number in range(400):
        for done in fleet.advance(0.02 * number):
            del in_flight[done.replica][done.request_id]
        prompt, output = (int(length) for length in rng.integers(1, (2000, 200)))
        known = int(rng.integers(1, output + 1))
        steps = np.array([DRAWN, known, EXCLUDED if number % 3 == 0 else DRAWN])
        chosen = fleet.least_delay(prompt, output, "chat", 0.0, costs, steps, last_steps)
        assert steps[:2].tolist() == [output, known]
        delays_s = []
        for replica, (base_s, per_request_s, per_context_s, per_prompt_s) in enumerate(costs.tolist()):
            own_s = per_request_s + per_context_s * (prompt + output / 2)
            delay_s = steps[replica] * (base_s + own_s) + per_prompt_s * prompt * (1 + len(in_flight[replica]))
            for request_id, tokens in in_flight[replica].items():
                left = max(1, last_steps[request_id] - pool[replica].steps)
                delay_s += (own_s + per_request_s + per_context_s * tokens) * min(steps[replica], left)
            delays_s.append(delay_s if steps[replica] else math.inf)
        assert chosen == np.argmin(delays_s)
        request_id = fleet.submit(chosen, prompt, output, 0.02 * number)
        last_steps[request_id] = pool[chosen].steps + steps[chosen]
        in_flight[chosen][request_id] = prompt + output / 2
        chosen_of.append(chosen)
    assert min(np.bincount(chosen_of, minlength=3)) > 20
    assert max(map(len, in_flight)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [1, 940, 1900])  # below, between and above the contexts
@pytest.mark.parametrize(
    "progress", [None, Progress(output_tokens=(20, 60, 150), logit_shifts=(-0.5, 0.9, 0.2), source="made up")]
)
def test_draws_with_a_draft_model_match_those_of_whole_requests(progress: Progress | None, prompt: int) -> None:
    entry = H100.methods[Method.EAGLE3]
    chat = entry.acceptance[Kind.CHAT].model_copy(update={"progress": progress})
    entry = entry.model_copy(update={"acceptance": {Kind.CHAT: chat}, "context": SHIFT})
    calibration = H100.model_copy(update={"methods": H100.methods | {Method.EAGLE3: entry}})
    fleet = single(Method.EAGLE3, {"num_speculative_tokens": 5}, calibration, seed=3)
    rng = np.random.default_rng(0)
    ours = np.array([drawn_script(fleet, number, 200, "chat", 0.6, prompt).emitted[1:195] for number in range(3000)])
    theirs = np.array(
        [model_based_replay(rng, calibration, Method.EAGLE3, 5, 0.6, "chat", prompt, 200)[0] for _ in range(3000)]
    )
    theirs = theirs[:, 1:195]
    for part in (slice(0, 40), slice(40, 100), slice(100, 194)):
        for tokens in range(1, 7):
            share = np.mean(ours[:, part] == tokens)
            assert share == pytest.approx(np.mean(theirs[:, part] == tokens), abs=0.01)
    assert ours.mean(axis=1).std() == pytest.approx(theirs.mean(axis=1).std(), rel=0.08)


def test_draws_without_a_draft_model_match_the_lookup_shares() -> None:
    fleet = single(Method.NGRAM, NGRAM, seed=3)
    scripts = [drawn_script(fleet, number, 200) for number in range(4000)]
    shares = lookup_shares(Method.NGRAM, "chat", 5, 4, 4)
    odds = np.exp(shares.request_spread * np.random.default_rng(0).standard_normal(200_000))
    emitted = np.array([script.emitted[1:190] for script in scripts])
    drafted = np.array([script.drafted[1:190] for script in scripts])
    assert (emitted <= drafted + 1).all()
    for position in range(1, 6):
        for seen, share in ((drafted >= position, shares.drafted), (emitted > position, shares.accepted)):
            at = share[position - 1]
            of_requests = odds * at / (1 - at + odds * at)
            assert seen.mean() == pytest.approx(of_requests.mean(), rel=0.06)
            assert seen.mean(axis=1).std() == pytest.approx(of_requests.std(), rel=0.12)


def test_lookup_shares_exist_for_every_k_and_kind_and_accept_no_more_than_is_drafted() -> None:
    for method, bounds in ((Method.NGRAM, (2, 4)), (Method.NGRAM, (1, 9)), (Method.SUFFIX, (0, 0))):
        for kind in ("chat", "code", "rag", "reasoning", "no such kind"):
            for k in (1, 2, 5, 24, 40):
                shares = lookup_shares(method, kind, k, *bounds)
                assert len(shares.drafted) == len(shares.accepted) == k
                assert all(
                    accepted <= drafted for drafted, accepted in zip(shares.drafted, shares.accepted, strict=True)
                )
                assert list(shares.accepted) == sorted(shares.accepted, reverse=True)


def test_the_draws_of_a_request_do_not_depend_on_its_replica() -> None:
    def steps(order: list[int]) -> dict[int, int]:
        fleet = Fleet([SimulatedReplica(str(number), H100, Method.EAGLE3, EAGLE) for number in range(3)], seed=9)
        for number, chosen in enumerate(order):
            fleet.submit(chosen, 100, 250, 0.1 * number)
        return {done.request_id: done.steps for done in fleet.advance(math.inf)}

    assert steps([0, 1, 2, 0, 1, 2]) == steps([0, 0, 0, 0, 1, 2])
    assert len(set(steps([0, 1, 2, 0, 1, 2]).values())) > 1


def test_load_is_the_last_report() -> None:
    seen = replica(PLAIN)
    fleet = Fleet([seen], report_every_s=0.5)
    fleet.submit(0, 10, 1000, 0.1)
    fleet.submit(0, 10, 10, 0.1)
    fleet.advance(0.11)
    assert (seen.load.running, seen.load.at_s) == (0, math.inf)
    fleet.advance(0.6)
    assert (seen.load.running, seen.load.at_s) == (1, math.inf)
    fleet.advance(60.0)
    assert (seen.load.running, seen.load.at_s, seen.in_flight) == (0, math.inf, 0)
