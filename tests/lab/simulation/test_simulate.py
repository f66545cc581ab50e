"""Replay of a trace with a policy in the loop: the use of each part of a record, and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.drafter_limit import Beyond, DrafterLimit
from backends.drafting.ngram import lookup_bounds, ngram_replay
from backends.speculation import Method
from lab.simulation.drafts import tokens_per_step
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest, replay_request
from lab.simulation.simulate import Replayed, replay
from lab.simulation.table import request_table
from lab.trace.record import SpeculationRecord, TraceRecord
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.policy import Learned
from policies.policy import Policy, policies
from tests.support.step_time import step_s

CALIBRATION = "llama-3.1-8b-h100"


def replica(method: Method, k: int = 0, name: str = "", max_model_len: int | None = None) -> ReplicaSpec:
    config = {"num_speculative_tokens": k} if k else {}
    return ReplicaSpec(name or method.value, method, config, CALIBRATION, max_model_len=max_model_len)


POOL = [replica(Method.BASELINE), replica(Method.NGRAM, 5), replica(Method.SUFFIX), replica(Method.EAGLE3, 3)]


def policy(name: str, **settings: object) -> Policy:
    known = policies()[name]
    return known(known.Settings.model_validate({"seed": 1, **settings}))


def record(**given: object) -> TraceRecord:
    known = {"temperature": 0.0, "prompt_tokens": 100, "output_tokens": 12}
    return TraceRecord(**{**known, **given})  # type: ignore[arg-type]


def mixed(count: int, gap_s: float) -> list[ReplayRequest]:
    """Return requests in two templates; n-gram and suffix drafting work well in one of them only."""
    rng = np.random.default_rng(5)
    requests = []
    for number, arrived_s in enumerate(np.cumsum(rng.exponential(gap_s, count))):
        copies = bool(number % 2)
        requests.append(
            replay_request(
                record(
                    prompt_tokens=int(rng.integers(50, 600)),
                    output_tokens=int(rng.integers(20, 250)),
                    template="aaaaaaaa" if copies else "bbbbbbbb",
                    acceptance={"ngram": 4.5, "suffix": 6.0, "eagle3": 1.6}
                    if copies
                    else {"ngram": 1.1, "suffix": 1.2, "eagle3": 3.0},
                ),
                float(arrived_s),
                0.0,
            )
        )
    return requests


def steps(request: ReplayRequest, method: Method, k: int) -> tuple[list[int], list[int]]:
    script = request.script(method, k, {})
    assert script is not None
    return script.emitted.tolist(), script.drafted.tolist()


def alone(method: Method, k: int, prompt_tokens: int, emitted: Sequence[int], drafted: Sequence[int]) -> float:
    """Return the time of one request by the formula of a step."""
    config = {"num_speculative_tokens": k} if k else {}
    parameters = EngineParameters.of(load_calibration(CALIBRATION), method, config)
    total_s = step_s(parameters, prompt_tokens, 0, k, 1, drafted=False)
    total_s += (1 + parameters.drafting.verify_share) * parameters.step.per_attended_s * prompt_tokens**2 / 2
    position = 1
    while position < len(emitted):
        tokens, context_tokens = 1 + drafted[position], prompt_tokens + position - 1
        total_s += step_s(parameters, tokens, context_tokens, k, 1, drafted=drafted[position] > 0)
        position += emitted[position]
    return total_s + parameters.outside_s


def play(pool: Sequence[ReplicaSpec], requests: Sequence[ReplayRequest]) -> Replayed:
    return replay(pool, requests, policy("least_loaded"))


def test_recorded_steps_determine_the_time_of_a_request() -> None:
    # from position 1: 4 tokens, then 2 at 5, then 9 at 7, which k limits to 4, and the last one
    recorded = [1, 4, 1, 1, 1, 2, 1, 9, 1, 1, 1, 1]
    request = replay_request(record(acceptance={"eagle3": recorded}), 0.0, 0.0)
    emitted, drafted = steps(request, Method.EAGLE3, 3)
    assert emitted == [1, 4, 1, 1, 1, 2, 1, 4, 1, 1, 1, 1]
    assert drafted == [0] + 11 * [3]
    result = play([replica(Method.EAGLE3, 3)], [request])
    assert result.e2e_s[0] == pytest.approx(alone(Method.EAGLE3, 3, 100, emitted, drafted), rel=1e-12)
    slow = play([replica(Method.EAGLE3, 3)], [replay_request(record(acceptance={"eagle3": 12 * [1]}), 0.0, 0.0)])
    # a prefill and 4 steps against a prefill and 11: the same step time except for a longer context
    assert (slow.e2e_s - slow.ttft_s)[0] / (result.e2e_s - result.ttft_s)[0] == pytest.approx(11 / 4, rel=0.01)


def test_recorded_steps_are_repeated_to_the_length_of_the_answer() -> None:
    emitted, drafted = steps(replay_request(record(acceptance={"suffix": [1, 3, 2]}), 0.0, 0.0), Method.SUFFIX, 24)
    assert emitted == [1, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 1]  # never past the end
    assert drafted == [0, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 0]


@pytest.mark.parametrize(("recorded", "mean"), [(2.4, 2.4), (0.3, 1.0), (9.0, 4.0)])
def test_a_recorded_mean_is_kept_as_far_as_k_allows(recorded: float, mean: float) -> None:
    request = replay_request(record(output_tokens=4000, acceptance={"eagle3": recorded}), 0.0, 0.0)
    assert _mean(request, 3) == pytest.approx(mean, rel=0.001)


@pytest.mark.parametrize(("k", "mean"), [(1, 1.5), (2, 1.75), (3, 1.875)])
def test_a_mean_that_was_recorded_at_one_k_is_less_at_a_smaller_one(k: int, mean: float) -> None:
    known = record(output_tokens=4000, acceptance={"eagle3": 1.75}, backend="a", method="eagle3", error="")
    spec = SpeculationRecord(drafted_tokens=200, drafting_steps=100, tokens_per_step=1.75)
    with request_table([replace(known, spec=spec)], 0.0) as table:
        assert _mean(table[0], k) == pytest.approx(mean, rel=0.02)
        per_step = tokens_per_step(load_calibration(CALIBRATION), Method.EAGLE3, {"num_speculative_tokens": 3}, table)
        assert per_step[k] == pytest.approx(mean, rel=0.02)


def _mean(request: ReplayRequest, k: int) -> float:
    emitted, _ = steps(request, Method.EAGLE3, k)
    position, taken = 0, 0
    while position < len(emitted):
        position, taken = position + emitted[position], taken + 1
    return len(emitted) / taken


def test_ngram_and_suffix_drafting_run_on_the_text() -> None:
    prompt = list(range(100, 150))
    output = list(range(110, 140))
    request = replay_request(
        record(prompt_tokens=50, output_tokens=40, prompt_token_ids=prompt, output_token_ids=output), 0.0, 0.0
    )
    emitted, drafted = steps(request, Method.NGRAM, 5)
    assert emitted[:30] == ngram_replay(prompt, output, 5, *lookup_bounds({}))[0].tolist()
    assert max(emitted) == 6  # the answer is copied
    assert emitted[30:] == 10 * [1]  # the text is shorter than the recorded length
    assert drafted[30:] == 10 * [0]
    assert max(steps(request, Method.SUFFIX, 24)[0]) > 1
    assert request.script(Method.EAGLE3, 3, {}) is None
    recorded = replace(request, acceptance={"ngram": 1.0}, _scripts={})
    assert steps(recorded, Method.NGRAM, 5)[0] == 40 * [1]  # recorded acceptance has precedence over the text


def test_without_acceptance_or_text_steps_are_drawn_by_workload_and_seed() -> None:
    requests = [replay_request(record(output_tokens=200, workload="code"), 60.0 * n, 0.0) for n in range(20)]
    assert requests[0].script(Method.SUFFIX, 24, {}) is None
    pool = [replica(Method.SUFFIX)]
    first, again, other = (replay(pool, requests, policy("least_loaded"), seed=seed) for seed in (1, 1, 2))
    assert first.e2e_s.tolist() == again.e2e_s.tolist()
    assert first.e2e_s.tolist() != other.e2e_s.tolist()
    plain = play([replica(Method.BASELINE)], requests)
    assert first.e2e_s.mean() < plain.e2e_s.mean()
    chat = play(pool, [replay_request(record(output_tokens=200, workload="chat"), 60.0 * n, 0.0) for n in range(20)])
    assert first.e2e_s.mean() < chat.e2e_s.mean()  # code repeats itself more often


def test_the_warm_up_is_simulated_but_not_counted() -> None:
    requests = mixed(100, 0.02)
    whole = play(POOL, requests)
    rest = replay(POOL, requests, policy("least_loaded"), warmup=30)
    assert rest.e2e_s.tolist() == whole.e2e_s.tolist()[30:]
    assert rest.duration_s < whole.duration_s
    cold = play(POOL, requests[30:])
    assert rest.e2e_s.tolist() != cold.e2e_s.tolist()  # requests of the warm-up were still in flight


@pytest.mark.slow
def test_too_long_requests_are_errors_except_in_the_warm_up() -> None:
    pool = [replica(Method.BASELINE, max_model_len=400), replica(Method.EAGLE3, 3, max_model_len=400)]
    lengths = [300, 5000, 300, 5000, 300]
    requests = [replay_request(record(prompt_tokens=n), 0.1 * at, 0.0) for at, n in enumerate(lengths)]
    for name in ("least_loaded", "learned", None):
        chosen = None if name is None else policy(name)
        result = replay(pool, requests, chosen)
        assert (result.errors, len(result.e2e_s)) == (2, 3)
        if isinstance(chosen, Learned):  # they do not remain in the work of a replica
            assert {one.sent for one in chosen.known.replicas.values()} == {0}
    after = replay(pool, requests, policy("least_loaded"), warmup=2)
    assert (after.errors, len(after.e2e_s)) == (1, 2)
    acceptance = {"eagle3": [1, 2], "suffix": 2.0}
    endless = [record(prompt_tokens=2**64 - 1), record(output_tokens=2**64 - 1, acceptance=acceptance)]
    endless.append(record(output_tokens=2**40, output_token_ids=[1, 2], prefix_blocks=[1], block_tokens=2**40))
    with request_table(endless, 0.0) as table:
        for name in ("least_loaded", None):
            assert replay(POOL, table, None if name is None else policy(name), remembers=True).errors == 3
    none = replay(pool, requests[1:2], policy("least_loaded"))
    assert (none.errors, len(none.e2e_s), none.duration_s) == (1, 0, 0.0)


def test_requests_that_need_a_baseline_go_to_one() -> None:
    requests = [replay_request(record(baseline_only=("min_p",)), 0.1 * n, 0.0) for n in range(6)]
    for chosen in (policy("random"), None):
        assert set(replay(POOL, requests, chosen).backend.tolist()) == {0}
    assert replay(POOL[1:], requests, policy("random")).errors == 6


@pytest.mark.parametrize(("name", "beyond"), [("learned", Beyond.CRASH), ("random", Beyond.BATCH)])
def test_requests_beyond_a_drafters_limit_go_elsewhere(name: str, beyond: Beyond) -> None:
    pool = [replica(Method.BASELINE), *[replica(Method.EAGLE3, 3, f"e{number}") for number in range(2)]]
    limited = [replace(one, drafter_limit=DrafterLimit(2048, beyond)) for one in pool]
    limited[0] = pool[0]
    lengths = [3000 if number % 5 == 0 else 300 for number in range(60)]
    requests = [replay_request(record(prompt_tokens=n), 0.2 * at, 0.0) for at, n in enumerate(lengths)]
    result = replay(limited, requests, policy(name))
    assert result.errors == 0
    assert set(result.backend[::5].tolist()) == {0}
    assert len(set(result.backend.tolist())) > 1


@pytest.mark.parametrize("gap_s", [1.0, 0.02])
def test_no_policy_beats_the_oracle(gap_s: float) -> None:
    requests = mixed(300, gap_s)
    best = replay(POOL, requests, None).e2e_s.mean()
    for name in ("least_loaded", "random", "learned"):
        assert best <= replay(POOL, requests, policy(name)).e2e_s.mean()


def test_a_policy_knows_the_engines_queues_however_long_the_machine_is_up() -> None:
    pool = [replace(one, kv_blocks=100) for one in POOL]
    times = [replay(pool, mixed(300, 0.02), policy("learned", stale_after_s=s)).e2e_s.mean() for s in (1e-9, 1e9)]
    assert times[0] == times[1]


def test_shared_prefixes_hit_the_cache() -> None:
    blocks = {"prefix_blocks": (7, 8, 9), "block_tokens": 512, "prompt_tokens": 1600, "output_tokens": 2}
    alike = [replay_request(record(**blocks), 10.0 * n, 0.0) for n in range(2)]
    result = play([replica(Method.BASELINE)], alike)
    assert result.ttft_s[1] < 0.5 * result.ttft_s[0]
    assert alike[0].features.prefix_tokens == (512, 1024, 1536)


def test_a_suffix_replica_remembers_its_own_answers() -> None:
    """The same answer to two prompts, on one replica, and on one each."""
    rng = np.random.default_rng(3)
    answered = record(prompt_tokens=50, output_tokens=200, output_token_ids=rng.integers(0, 30_000, 200).tolist())
    prompts = rng.integers(0, 30_000, (2, 50)).tolist()
    requests = [replay_request(replace(answered, prompt_token_ids=ids), 60.0 * n, 0.0) for n, ids in enumerate(prompts)]
    pool = [replica(Method.SUFFIX, 24)]
    again = replay(pool, requests, policy("least_loaded"), remembers=True).e2e_s
    apart = replay(pool, requests[1:], policy("least_loaded"), remembers=True).e2e_s
    forgetful = replay(pool, requests, policy("least_loaded")).e2e_s
    assert again[1] < 0.3 * again[0]
    assert [apart[0], forgetful[1], again[0]] == pytest.approx([forgetful[0]] * 3, rel=1e-3)


def test_a_record_has_the_features_that_the_policy_saw() -> None:
    known = RequestFeatures(
        "m", Endpoint.COMPLETIONS, stream=True, n=2, temperature=0.3, top_p=0.9, overlap=0.5, code_share=0.2,
        prompt_tokens=77, max_tokens=50, template="0a1b2c3d", turns=3, structured=True, tools=True,
        baseline_only=("min_p",), qps=2.5, in_flight=4, workload="code",
    )  # fmt: skip
    names = [name for name in TraceRecord.__dataclass_fields__ if name in RequestFeatures.__dataclass_fields__]
    record = TraceRecord(**{name: getattr(known, name) for name in names})
    assert replay_request(record, 0.0, 1.0).features == known


def turn(at_s: float, session: str = "a", think_time_s: float | None = None, prompt_tokens: int = 640) -> ReplayRequest:
    one = record(arrived_at=at_s, session=session, think_time_s=think_time_s, prompt_tokens=prompt_tokens)
    return replay_request(one, at_s, 0.0)


def test_a_request_of_a_session_follows_the_simulated_answer() -> None:
    turns = [turn(0.0), turn(1.0, think_time_s=2.5), turn(2.0, "b"), turn(9.0, think_time_s=0.5), turn(9.25)]
    plain = replica(Method.BASELINE)
    fast, slow = (play([replace(plain, calibration=name)], turns) for name in (CALIBRATION, "llama-3.1-70b-4xh100"))
    for one in (fast, slow):
        ends_s = one.arrived_s + one.e2e_s
        assert one.arrived_s[1] == pytest.approx(ends_s[0] + 2.5)
        assert one.arrived_s[2] == 2.0
        assert one.arrived_s[3] == pytest.approx(ends_s[1] + 0.5)
        assert one.arrived_s[4] == pytest.approx(one.arrived_s[3] + 0.25), "without a think time it keeps its distance"
    assert slow.arrived_s[3] > fast.arrived_s[3]


def test_a_refused_request_does_not_end_its_session() -> None:
    one = play([replica(Method.BASELINE)], [turn(0.0, prompt_tokens=200_000), turn(1.0, think_time_s=2.0)])
    assert (one.errors, one.number.tolist(), one.arrived_s.tolist()) == (1, [1], [2.0])
