"""Kinds, whether they fit into memory, mixes, and the search for the best mix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.calibration.calibration import Calibration
from backends.calibration.files import calibration_names
from backends.calibration.load import load_calibration
from backends.speculation import Method
from lab.plan.memory import fit
from lab.plan.mixes import DRAFTS, Mix, ReplicaKind, gpus_of, kind_of, kinds, mixes, neighbours, title
from lab.plan.planning import choose, judged, play
from lab.plan.result import PlanObjective
from lab.plan.runner import MixRunner, MixTask
from lab.plan.search import Found, Split, find_mixes
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest, replay_request
from lab.simulation.simulate import Replayed, replay
from lab.trace.record import TraceRecord
from policies.build import build
from policies.policy import policies

CALIBRATION = "llama-3.1-8b-h100"
H100 = load_calibration(CALIBRATION)


def _kinds() -> list[ReplicaKind]:
    return kinds(H100, 8192)


def _requests(count: int, gap_s: float, *, seed: int = 0, **told: object) -> tuple[ReplayRequest, ...]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(gap_s, count))
    made = []
    for at_s in times:
        record = TraceRecord(
            prompt_tokens=int(rng.integers(50, 800)), temperature=0.0, workload="chat",
            output_tokens=int(rng.integers(20, 300)),
            **told,  # type: ignore[arg-type]
        )  # fmt: skip
        made.append(replay_request(record, float(at_s), 0.0))
    return tuple(made)


def _played(times: np.ndarray, ttft_s: np.ndarray | None = None, tpot_s: np.ndarray | None = None) -> Replayed:
    ttft_s, tpot_s = (0.1 * times if ttft_s is None else ttft_s), (0.01 * times if tpot_s is None else tpot_s)
    count = len(times)
    return Replayed(
        times, ttft_s, tpot_s, np.full(count, 9), np.zeros(count, np.int64), 0, 1.0, np.arange(count), np.zeros(count)
    )


def _runner(known: Sequence[ReplicaKind]) -> MixRunner:
    settings = policies()["least_loaded"].Settings.model_validate({"seed": 1})
    of = tuple(_requests(60, 0.2, seed=number) for number in range(5))
    return MixRunner(CALIBRATION, tuple(known), "least_loaded", settings, of)


def _task(mix: tuple[int, ...], window: int, seed: int) -> MixTask:
    return MixTask(mix, (window,), (), seed)


def test_windows_follow_each_other_without_a_pause() -> None:
    requests = tuple(replace(one, arrived_s=0.01 * n) for n, one in enumerate(_requests(240, 1.0)))
    settings = policies()["least_loaded"].Settings.model_validate({"seed": 1})
    windows = tuple(requests[start : start + 60] for start in range(0, 240, 60))
    runner = MixRunner(CALIBRATION, (_kinds()[0],), "least_loaded", settings, windows)
    parts = runner(MixTask((0, 0), (1, 3), (0, 2), 5))
    pool = [ReplicaSpec(f"baseline-{n}", Method.BASELINE, {}, CALIBRATION) for n in range(2)]
    whole = replay(pool, requests, build("least_loaded", settings), seed=5)
    for part, numbers in zip(parts, (range(60, 120), range(180, 240)), strict=True):
        assert part.number.tolist() == list(numbers)
        assert part.e2e_s == pytest.approx(whole.e2e_s[numbers])
        assert (part.errors, part.duration_s) == (
            0,
            pytest.approx((whole.arrived_s + whole.e2e_s)[numbers].max() - 0.01 * numbers[0]),
        )


def test_every_mix_is_generated_once() -> None:
    several = {0: Method.BASELINE, 1: Method.EAGLE3, 2: Method.EAGLE3, 3: Method.NGRAM, 4: Method.NGRAM}
    generated = list(mixes(several, 4))
    assert not any({1, 2} <= set(mix) or {3, 4} <= set(mix) for mix in generated)  # one k of each method
    assert (2, 2, 2, 2) in set(neighbours((1, 1, 1, 1), several))
    methods = dict(enumerate([Method.BASELINE, Method.NGRAM, Method.SUFFIX, Method.EAGLE3]))
    generated = list(mixes(methods, 3))
    assert len(generated) == len(set(generated)) == 20
    assert all(list(mix) == sorted(mix) for mix in generated)
    del methods[3]
    assert set(neighbours((0, 0, 2), methods)) == {
        (0, 1, 2), (1, 1, 2), (0, 2, 2), (2, 2, 2), (0, 0, 0), (0, 0, 1)
    }  # fmt: skip


def test_kinds_need_a_known_speed_and_draft() -> None:
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
    assert not any(kind.fit.fits for kind in kinds(H100, 1_000_000))
    # MTP's acceptance is not published for this target
    assert kinds(H100, 8192, [(Method.MTP, (1,))]) == []


def test_a_calibration_names_its_gpus_and_a_target_with_drafts() -> None:
    assert gpus_of(load_calibration("llama-3.1-70b-4xh100")) == 4
    assert [gpus_of(H100.model_copy(update={"hardware": own})) for own in ("4090", "8xH100")] == [1, 8]
    assert set(DRAFTS) <= {load_calibration(name).target for name in calibration_names()}


def test_a_replica_of_the_present_pool_has_a_kind() -> None:
    config = {"num_speculative_tokens": 4, "prompt_lookup_max": 2}
    kind = kind_of(Method.NGRAM, config, H100)
    assert (kind.k, kind.config, kind.fit.fits) == (4, config, True)


def test_a_replica_has_the_kv_cache_of_its_memory_fit() -> None:
    known = _kinds()
    part = tuple(replace(one, arrived_s=0.0) for one in _requests(120, 0.1))
    entry = policies()["round_robin"]

    def e2e_s(tokens: int) -> float:
        small = [replace(kind, fit=replace(kind.fit, tokens=tokens)) for kind in known]
        runner = MixRunner(CALIBRATION, tuple(small), "round_robin", entry.Settings(), (part,))
        return float(runner(_task((0, 6), 0, 3))[0].e2e_s.mean())

    assert e2e_s(4_000) > 2 * e2e_s(known[0].fit.tokens)  # a few requests at a time instead of all at once


def test_requests_that_need_a_baseline_get_one_into_the_mix() -> None:
    known = _kinds()
    parts = tuple(
        (*_requests(30, 0.5, seed=n), *_requests(1, 40.0, seed=n, baseline_only=("min_p",))) for n in range(5)
    )
    parts = tuple(tuple(sorted(part, key=lambda one: one.arrived_s)) for part in parts)
    entry = policies()["least_loaded"]
    runner = MixRunner(CALIBRATION, tuple(known), "least_loaded", entry.Settings.model_validate({"seed": 1}), parts)

    split = Split((), (0,), (1, 2, 3, 4))
    found = find_mixes(known, [0, 6], 2, split, _each(runner), PlanObjective(), present=(6, 6))
    played = play(found.finalists, split, _each(runner))
    chosen = choose(found, played, PlanObjective())
    assert chosen == (0, 6)  # two heads would be faster
    present = next(one for one in judged(chosen, played, PlanObjective()) if one.mix == (6, 6))
    assert (present.loss, present.worse_in, present.value) == (None, 1.0, np.inf)
    with pytest.raises(ValueError, match="need a baseline"):
        find_mixes(known, [6], 2, split, _each(runner), PlanObjective())


def _each(run: Callable[[MixTask], list[Replayed]]) -> Callable[[Sequence[MixTask]], list[list[Replayed]]]:
    return lambda tasks: list(map(run, tasks))


def test_few_mixes_are_all_tried_and_the_best_is_chosen() -> None:
    known, split = _kinds(), Split((), (0,), (1, 2, 3, 4))
    runner = _runner(known)
    found = find_mixes(known, [0, 3, 6], 2, split, _each(runner), PlanObjective(), present=(0, 0))
    assert found.tried == 6
    everything = [(0, 0), (0, 3), (0, 6), (3, 3), (3, 6), (6, 6)]
    means = {mix: float(runner(_task(mix, 0, 0))[0].e2e_s.mean()) for mix in everything}
    assert found.finalists[0] == min(means, key=lambda mix: means[mix])
    assert {(0, 0), (3, 3), (6, 6)} < set(found.finalists)  # all replicas alike, of each method
    played = play(found.finalists, split, _each(runner))
    results = judged(found.finalists[0], played, PlanObjective())
    assert results[0].mix == found.finalists[0]
    assert [one.value for one in results[1:]] == sorted(one.value for one in results[1:])
    present = next(one for one in results if one.mix == (0, 0))
    assert present.loss is not None
    assert 0 < present.loss.low < present.loss.value < present.loss.high
    assert present.loss.value == pytest.approx(present.e2e_s / results[0].e2e_s - 1)
    assert present.worse_in == 1.0


def _made_up() -> Callable[[MixTask], list[Replayed]]:
    """Return a synthetic run: replicas of kinds 2 and 3 save time, up to three of each."""

    def run(task: MixTask) -> list[Replayed]:
        mix, played = task.mix, []
        for window in task.counted:
            rng = np.random.default_rng((window, task.seed))
            mean = 10 - 1.5 * min(mix.count(2), 3) - 1.6 * min(mix.count(3), 3) + 0.1 * len(set(mix))
            played.append(_played(mean * rng.lognormal(0, 0.2, 400)))
        return played

    return run


def test_the_search_finds_the_best_mix_without_trying_all() -> None:
    found = find_mixes(
        _kinds(), range(8), 6, Split((), (0,), (1,)), _each(_made_up()), PlanObjective(), budget=150
    )  # fmt: skip
    assert found.tried < 300
    assert found.finalists[0] == (2, 2, 2, 3, 3, 3)


def test_all_replicas_alike_are_preferred_unless_a_mix_is_shown_to_be_better() -> None:
    alike: Mix = (3, 3)
    mixed: Mix = (2, 3)
    other: Mix = (2, 2)
    found = Found((mixed, alike, other), 3)
    times = np.random.default_rng(0).lognormal(0, 0.2, 800)

    def chosen(worse: float, other_worse: float = 1.2) -> tuple[int, ...]:
        noise = np.random.default_rng(1).normal(1, 0.1, 800)
        both = {mixed: times, alike: worse * noise * times, other: other_worse * noise * times}
        played = {mix: [_played(part) for part in np.split(each, 8)] for mix, each in both.items()}
        assert set(played) == set(found.finalists)
        return choose(found, played, PlanObjective())

    assert chosen(1.0) == alike
    assert chosen(1.03) == mixed
    assert chosen(1.03, 1.0) == other  # the search found that it loses more than the first


def test_windows_are_split_into_those_to_learn_on_to_search_and_to_judge() -> None:
    for count in range(2, 25):
        split = Split.of(count)
        parts = [set(split.learning), set(split.searched), set(split.judged)]
        assert set().union(*parts) == set(range(count))
        assert sum(map(len, parts)) == count
        assert all(parts[1:])
        assert set(split.quick) <= set(split.searched)
    assert Split.of(19).quick == (1, 10), "from all of the time that is searched"
    with pytest.raises(ValueError, match="at least two windows"):
        Split.of(1)


def test_the_objective_can_be_the_share_that_keeps_the_slo() -> None:
    objective = PlanObjective({"ttft": 0.5, "tpot": 0.01})
    played = _played(np.array([1.0, 1.0, 99.0]), np.array([0.4, 0.6, 0.4]), np.array([0.009, 0.009, np.nan]))
    assert objective.values(played).tolist() == [1.0, 0.0, 1.0]
    served = objective.value([played, replace(played, errors=2)])
    assert served == pytest.approx(4 / 8), "unserved requests miss the SLO"


def test_of_mixes_that_keep_the_slo_equally_often_the_fastest_is_planned() -> None:
    objective = PlanObjective({"e2e": 10.0})
    slow: Mix = (0, 0)
    mixed: Mix = (0, 3)
    fast: Mix = (3, 3)
    played = {mix: [_played(np.full(20, e2e_s))] * 4 for mix, e2e_s in {slow: 3.0, mixed: 2.0, fast: 1.0}.items()}
    assert choose(Found((mixed, slow, fast), 3), played, objective) == fast
    assert [one.mix for one in judged(fast, played, objective)] == [fast, mixed, slow]
    assert [one.worse_in for one in judged(fast, played, objective)] == [0.0, 0.0, 0.0]


def test_without_a_usable_kind_there_is_no_plan() -> None:
    with pytest.raises(ValueError, match="no kind of replica fits"):
        find_mixes(_kinds(), [], 2, Split.of(2), lambda tasks: [], PlanObjective())


def with_memory(**changes: Any) -> Calibration:
    return H100.model_copy(update={"memory": H100.memory.model_copy(update=changes)})


@pytest.mark.parametrize("method", sorted(H100.methods))
def test_the_kv_cache_is_that_of_the_simulator_in_whole_blocks(method: Method) -> None:
    own = fit(H100, method)
    assert own.fits
    assert own.tokens == H100.kv_tokens(method) // 16 * 16


def test_a_replica_that_does_not_fit_has_a_reason() -> None:
    large = fit(with_memory(weights_gib=80.0), Method.BASELINE)
    assert (large.fits, large.tokens) == (False, 0)
    assert large.kv_gib < 0
    assert large.reason == "80.00 GiB of weights do not fit on 1x H100 80GB: 11.4 GiB short"
    short = fit(with_memory(gpu_gib=24.0), Method.BASELINE, 131_072)
    assert not short.fits
    assert 0 < short.tokens < 131_072
    assert f"it would start with --max-model-len {short.tokens}" in short.reason
    assert fit(with_memory(gpu_gib=24.0), Method.BASELINE, short.tokens).fits
    large_draft = fit(with_memory(gpu_gib=2.29 / 0.151, weights_gib=1.0), Method.DRAFT_MODEL)
    assert not large_draft.fits
    assert "are 15% of 1x H100 80GB; above 15% a draft costs more context" in large_draft.reason
    assert fit(with_memory(gpu_gib=2.29 / 0.149, weights_gib=1.0), Method.DRAFT_MODEL).fits
