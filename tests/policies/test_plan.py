"""Which mixes there are, which fit, and whether the search finds the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from backends.memory import Machine
from backends.memory_catalogue import gpu
from backends.simulator.calibration import load_calibration
from backends.simulator.virtual_time import Arrival, run_fleet
from backends.speculation import Method
from policies.mix_play import Played, Request, play, requests_of
from policies.mixes import (
    Kind,
    calibration_on,
    count_mixes,
    kind_of,
    kinds,
    machine_of,
    mixes,
    neighbours,
    title,
)
from policies.plan import Game, Objective, Slo, Task, find
from policies.policy import PolicySettings, policies
from policies.request import Endpoint, RequestFeatures
from policies.trace import TraceRecord

CALIBRATION = "llama-3.1-8b-h100"
H100 = load_calibration(CALIBRATION)


def _kinds(max_model_len: int = 8192) -> list[Kind]:
    return kinds(H100, machine_of(H100), max_model_len)


def _requests(count: int, gap_s: float, *, workloads: Sequence[str] = ("chat",), seed: int = 0) -> tuple[Request, ...]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(gap_s, count))
    return tuple(
        Request(
            float(at_s),
            RequestFeatures(
                "m", Endpoint.CHAT, prompt_tokens=int(rng.integers(50, 800)), temperature=0.0,
                workload=workloads[number % len(workloads)],
            ),
            int(rng.integers(20, 300)),
        )
        for number, at_s in enumerate(times)
    )  # fmt: skip


def _game(known: Sequence[Kind], parts: int = 4, **given: object) -> Game:
    entry = policies()["least_loaded"]
    settings = entry.Settings.model_validate({"seed": 1})
    return Game(
        CALIBRATION, tuple(known), "least_loaded", settings, tuple(_requests(60, 0.2, seed=n) for n in range(parts))
    )


def test_mixes_are_all_and_each_once() -> None:
    found = list(mixes(4, 3))
    assert len(found) == len(set(found)) == count_mixes(4, 3) == 20
    assert all(list(mix) == sorted(mix) for mix in found)
    assert set(neighbours((0, 0, 2), 3)) == {(0, 1, 2), (0, 2, 2), (0, 0, 0), (0, 0, 1)}


def test_kinds_are_those_of_which_speed_and_draft_are_known() -> None:
    known = _kinds()
    assert [kind.title for kind in known] == [
        "baseline", "ngram k=3", "ngram k=5", "suffix", "eagle k=3", "eagle3 k=2", "eagle3 k=3", "eagle3 k=5",
        "draft_model k=3", "draft_model k=5",
    ]  # fmt: skip
    assert all(kind.fit.fits for kind in known)
    eagle3 = next(kind for kind in known if kind.title == "eagle3 k=2")
    assert eagle3.config == {"num_speculative_tokens": 2, "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}
    assert known[0].config == {}
    assert known[1].config == {"num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert title((0, 3, 3), known) == "1x baseline, 2x suffix"
    # nothing was published of MTP's acceptance for this target
    assert kinds(H100, machine_of(H100), 8192, [(Method.MTP, (1,))]) == []


def test_what_does_not_fit_is_told() -> None:
    small = Machine(gpu("l4"))
    known = kinds(H100, small, 131_072)
    assert not any(kind.fit.fits for kind in known)
    assert "less than one request" in known[0].fit.reason


def test_another_gpu_has_its_own_step_times_or_none() -> None:
    assert calibration_on(H100, "h100") is H100
    assert calibration_on(H100, "h200").name == "llama-3.1-8b-h200"
    assert calibration_on(H100, "l40s").name == "llama-3.1-8b-l40s"
    with pytest.raises(
        ValueError, match=r"no step times of meta-llama/Llama-3.1-8B-Instruct on b200 .*llama-3.1-8b-h200"
    ):
        calibration_on(H100, "b200")
    with pytest.raises(ValueError, match="no such GPU"):
        calibration_on(H100, "h1000")
    seventy = load_calibration("llama-3.1-70b-4xh100")
    assert machine_of(seventy).title == "4x H100 80GB"
    assert machine_of(seventy, gpu("h200")).tensor_parallel == 4


def test_a_replica_of_the_present_pool_is_a_kind() -> None:
    config = {"num_speculative_tokens": 4, "prompt_lookup_max": 2}
    kind = kind_of(Method.NGRAM, config, H100, machine_of(H100))
    assert (kind.k, kind.config, kind.fit.fits) == (4, config, True)


def test_a_part_is_played_as_the_fleet_plays_it() -> None:
    from backends.simulator.fleet import Fleet, Replica

    known = _kinds()
    part = _requests(80, 0.1)
    entry = policies()["round_robin"]
    played = play(CALIBRATION, known, (0, 6), "round_robin", entry.Settings(), part, 3)
    fleet = Fleet(
        [Replica(str(n), H100, known[place].method, known[place].config) for n, place in enumerate((0, 6))], seed=3
    )
    arrivals = [
        Arrival(one.arrived_s, one.features.prompt_tokens, one.output_tokens, "chat", one.features.temperature)
        for one in part
    ]
    turn = iter(range(len(part)))
    timeline = run_fleet(fleet, arrivals, lambda _: next(turn) % 2)
    assert played.e2e_s.tolist() == timeline.e2e_s.tolist()
    assert played.ttft_s.tolist() == timeline.ttft_s.tolist()


def test_a_learning_policy_learns_while_it_is_played() -> None:
    known = _kinds()
    entry = policies()["learned"]
    seen: list[int] = []

    class Watched(entry):  # type: ignore[misc, valid-type]
        def observe(self, outcome):  # type: ignore[no-untyped-def]
            super().observe(outcome)
            seen.append(self.experience.observations)

    policies()  # registered
    from policies import policy as contract

    contract._REGISTRY["watched"] = Watched
    try:
        play(CALIBRATION, known, (3, 6), "watched", entry.Settings.model_validate({"seed": 1}), _requests(40, 0.3), 0)
    finally:
        del contract._REGISTRY["watched"]
    assert seen[-1] > 40


def test_requests_come_when_the_trace_says_or_at_a_rate() -> None:
    records = [
        TraceRecord(arrived_at=100.0 + 2 * n, prompt_tokens=600, output_tokens=5, prefix_blocks=(7, 9))
        for n in range(3)
    ]
    assert [one.arrived_s for one in requests_of(records, None, 4.0)] == [0.0, 0.5, 1.0]
    assert [one.arrived_s for one in requests_of(records, 10.0, 1.0)] == [0.0, 0.1, 0.2]
    blocks = requests_of(records, 1.0, 1.0)[0].prefix_blocks
    assert len(blocks) == 600 // 16
    assert blocks[31:33] == (7 * 32 + 31, 9 * 32)
    with pytest.raises(ValueError, match="give a rate"):
        requests_of([replace(records[0], arrived_at=None)], None, 1.0)


def test_all_mixes_are_tried_where_they_are_few_and_the_best_is_right() -> None:
    known = _kinds()
    game = _game(known)
    usable = [0, 3, 6]
    plan = find(game, usable, 2, lambda tasks: list(map(game, tasks)), objective=Objective(), present=(0, 0))
    assert (plan.tried, plan.possible) == (6, 6)
    means = {
        mix: float(np.mean([game((mix, part, 0)).e2e_s.mean() for part in (0, 2)]))
        for mix in [(0, 0), (0, 3), (0, 6), (3, 3), (3, 6), (6, 6)]
    }
    assert plan.chosen == min(means, key=lambda mix: means[mix])
    assert plan.judged[0].mix == plan.chosen
    present = next(one for one in plan.judged if one.mix == (0, 0))
    assert present.gain is not None
    assert 0 < present.gain.low < present.gain.value < present.gain.high
    assert present.better_in == 1.0
    assert len(set(plan.one_kind)) == 1


def _made_up(task: Task) -> Played:
    """As if each replica of kind 2 or 3 saved time, and one of each most of all."""
    mix, part, seed = task
    rng = np.random.default_rng((part, seed))
    mean = 10 - 1.5 * min(mix.count(2), 3) - 1.6 * min(mix.count(3), 3) + 0.1 * len(set(mix))
    times = mean * rng.lognormal(0, 0.2, 400)
    return Played(0.1 * times, 0.01 * times, times)


def test_the_search_finds_the_best_of_more_than_it_may_try() -> None:
    game = _game(_kinds(), parts=2)
    plan = find(game, range(8), 6, lambda tasks: list(map(_made_up, tasks)), objective=Objective(), budget=150)
    assert plan.possible == count_mixes(8, 6) == 1716
    assert plan.tried < 300
    assert plan.chosen == (2, 2, 2, 3, 3, 3)


def test_the_mix_that_keeps_most_within_the_slo() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.01)
    played = Played(np.array([0.4, 0.6, 0.4]), np.array([0.009, 0.009, np.nan]), np.array([1.0, 1.0, 99.0]))
    assert slo.kept(played).tolist() == [1.0, 0.0, 1.0]
    game = _game(_kinds(), parts=4)

    def run(tasks: Sequence[Task]) -> list[Played]:
        return list(map(_made_up, tasks))

    plan = find(game, range(4), 4, run, objective=Objective(Slo(e2e_s=5.0)), present=(0, 0, 0, 0))
    assert plan.chosen in {(2, 2, 3, 3), (2, 3, 3, 3)}
    present = next(one for one in plan.judged if one.mix == (0, 0, 0, 0))
    assert present.value < plan.judged[0].value <= 1.0
    assert present.gain is None or present.gain.low > 0


def test_what_cannot_be_planned() -> None:
    game = _game(_kinds(), parts=2)
    with pytest.raises(ValueError, match="no way of running a replica fits"):
        find(game, [], 2, lambda tasks: [], objective=Objective())
    with pytest.raises(ValueError, match="two parts at least"):
        find(replace(game, parts=game.parts[:1]), [0], 2, lambda tasks: [], objective=Objective())
    assert isinstance(game.settings, PolicySettings)
