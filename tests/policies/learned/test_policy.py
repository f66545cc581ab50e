"""The policy as a whole: it decides by what it learned, at a bounded price, and stops where it should."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from backends.backend import Backend, EngineLoad
from backends.simulator.engine.fleet import Replica
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models import step_time
from policies.learned.models.buckets import key_of
from policies.learned.policy import Learned, LearnedSettings, Slo
from policies.learned.settings import Exploration, GuardrailSettings
from policies.load_balancing import LeastLoaded, LoadSettings
from policies.policy import Decision, Outcome
from policies.statistics import Row
from tests.support.simulated import FOUR, calls, fit, play, replicas

REQUEST = RequestFeatures("m", Endpoint.CHAT, temperature=0.0, workload="chat", template="t", prompt_tokens=300)
NO_CONTROL = GuardrailSettings(share=0)


def _pool() -> list[Backend]:
    return [Backend(name, "m", method, "http://x", num_speculative_tokens=k) for name, method, k in FOUR]


def _policy(**settings: object) -> Learned:
    policy = Learned(LearnedSettings.model_validate({"seed": 1, **settings}))
    policy.explain_candidates = True
    return policy


def propensities(decision: Decision) -> dict[str, float]:
    """Return what a decision tells of all candidates."""
    considered = decision.considered
    assert considered is not None
    names = [one.name for one in considered.candidates]
    return dict(zip(names, considered.propensities, strict=True))


def _outcome(decision: Decision, request: RequestFeatures = REQUEST, **fields: object) -> Outcome:
    usual = Outcome(
        request=request,
        decision=decision,
        method=Method.EAGLE3,
        status=200,
        ttft_s=0.05,
        tpot_s=0.005,
        e2e_s=1.0,
        prompt_tokens=300,
        output_tokens=200,
        tokens_per_step=2.0,
    )
    return replace(usual, **fields)  # type: ignore[arg-type]


def test_it_finishes_sooner_than_least_loaded() -> None:
    """After 150 requests; it is 0.81 and 0.92 of the mean at the two loads where this was written."""
    ratios = []
    for per_s in (4.0, 20.0):
        requests = calls(600, per_s, 1)
        learned, fewest = (
            play(policy, replicas(), requests)[0].e2e_s[150:].mean()
            for policy in (_policy(), LeastLoaded(LoadSettings(seed=1)))
        )
        ratios.append(learned / fewest)
    assert np.exp(np.mean(np.log(ratios))) < 0.95


def test_the_same_seed_and_clock_decide_the_same() -> None:
    first, second = ([one.backend for one in play(_policy(), replicas(), calls(150, 20.0, 3))[1]] for _ in range(2))
    assert first == second


def test_propensities_sum_to_one_and_are_the_observed_frequencies() -> None:
    policy = _policy(exploration={"share": 0.3, "most": 0.6}, guardrail={"share": 0.3})
    pool, times = _pool(), 8000
    decisions = [policy.choose(REQUEST, pool) for _ in range(times)]
    told = propensities(decisions[0])
    assert sum(told.values()) == pytest.approx(1.0)
    assert all(share > 0 for share in told.values())
    seen = Counter(one.backend for one in decisions)
    for name, share in told.items():
        deviation = (share * (1 - share) / times) ** 0.5
        assert seen[name] / times == pytest.approx(share, abs=4.5 * deviation)
    assert all(one.propensity == pytest.approx(told[one.backend]) for one in decisions)
    assert {one.reason for one in decisions} == {"least_delay", "explore", "control"}


def test_what_may_not_be_used_to_learn_goes_where_it_is_best() -> None:
    policy = _policy(exploration={"share": 0.5, "most": 1.0}, guardrail={"share": 0.5})
    pool = _pool()
    best = min(policy.assess(REQUEST, pool), key=lambda one: one.score or 0.0).backend
    decisions = [policy.choose(replace(REQUEST, explore=False), pool) for _ in range(300)]
    assert {(one.backend, one.reason, one.propensity) for one in decisions} == {(best, "least_delay", 1.0)}
    assert len({policy.choose(REQUEST, pool).backend for _ in range(300)}) > 1


def test_the_price_of_exploring_is_what_was_agreed() -> None:
    policy = _policy(exploration={"share": 0.01, "most": 0.5}, guardrail={"share": 0})
    pool = _pool()
    costs = {one.backend: one.score or 0.0 for one in policy.assess(REQUEST, pool)}
    told = propensities(policy.choose(REQUEST, pool))
    expected = sum(propensity * costs[backend] for backend, propensity in told.items())
    assert min(costs.values()) < expected <= 1.01 * min(costs.values()) + 1e-12


def test_it_gathers_what_it_predicts_with() -> None:
    policy = _policy()
    assert not policy.predictor.fitted.steps
    play(policy, replicas(), calls(200, 10.0, 5))
    fit(policy)
    policy.choose(REQUEST, _pool())
    known = policy.predictor.fitted
    assert set(known.steps) == {"b", "n", "s", "e"}
    assert known.length.effects is not None
    assert any(arm in known.acceptance.arms for arm in ("eagle3:3", "suffix:24"))
    assert policy.maintenance() is None  # nothing new


def test_a_fit_pauses_between_its_parts_and_is_in_place_when_it_is_whole() -> None:
    policy, at_once = _policy(), _policy()
    for each in (policy, at_once):
        play(each, replicas(), calls(200, 10.0, 5))
    work = policy.maintenance()
    assert work is not None
    before, seen = policy.predictor.fitted, []

    def pause() -> None:
        policy.choose(REQUEST, _pool())
        seen.append(policy.predictor.fitted)

    work(pause)
    assert len(seen) > len(before.acceptance.arms) + 4
    assert all(one is before for one in seen)
    policy.choose(REQUEST, _pool())
    fit(at_once)
    at_once.choose(REQUEST, _pool())
    assert policy.predictor.fitted.steps == at_once.predictor.fitted.steps


def test_half_its_own_and_half_others_is_as_good_as_all_its_own() -> None:
    alone, shared = _policy(), _policy()
    play(alone, replicas(), calls(200, 10.0, 5))
    now_s = alone.clock()
    shared.set_clock(lambda: now_s)
    rows = [*alone.statistics.own()]
    for row in rows:
        table = alone.statistics.tables[row.table]
        assert int(now_s // table.epoch_s) >= row.epoch
    current = [row for row in rows if int(now_s // alone.statistics.tables[row.table].epoch_s) == row.epoch]
    assert len(current) == len(rows)  # all in one epoch, so that they can be added now
    for row in rows:
        shared.statistics.add(shared.statistics.tables[row.table], row.key, *(0.3 * each for each in row.sums))
    shared.statistics.set_others(Row(row.table, row.epoch, row.key, tuple(0.7 * s for s in row.sums)) for row in rows)
    for policy in (alone, shared):
        for backend in _pool():
            policy.predictor.of(backend)
        fit(policy)
        policy.choose(REQUEST, _pool())
    ours, both = (policy.assess(REQUEST, replicas()) for policy in (alone, shared))
    assert [one.score for one in both] == pytest.approx([one.score for one in ours], rel=1e-6)


def test_it_freezes_when_it_is_made_worse_and_says_so() -> None:
    policy, pool = _policy(guardrail={"share": 0.2}), _pool()
    rng = np.random.default_rng(1)
    for _ in range(1500):
        decision = policy.choose(REQUEST, pool)
        slow = 1.0 if decision.reason in ("control", "frozen") else 2.0
        policy.observe(_outcome(decision, e2e_s=slow * float(np.exp(rng.normal(0, 0.3)))))
    assert policy.guardrail.frozen
    assert policy.guardrail.freezes == 1
    decisions = [policy.choose(REQUEST, pool) for _ in range(400)]
    frozen = [one for one in decisions if one.reason == "frozen"]
    assert len(frozen) == pytest.approx(320, abs=40)
    assert set(Counter(one.backend for one in frozen)) == {"b", "n", "s", "e"}  # an idle pool: as least_loaded draws
    assert sum(propensities(decisions[0]).values()) == pytest.approx(1.0)
    for _ in range(1500):
        decision = policy.choose(REQUEST, pool)
        slow = 1.0 if decision.reason in ("control", "frozen") else 0.4
        policy.observe(_outcome(decision, e2e_s=slow * float(np.exp(rng.normal(0, 0.3)))))
    assert not policy.guardrail.frozen


def _broken(replica: Replica, times: float) -> Replica:
    """Return the same replica with a collapsed engine: every step takes so many times as long."""
    step = replica.parameters.step
    slow = step.model_copy(update={"base_s": times * step.base_s, "overhead_s": times * step.overhead_s})
    parameters = replace(replica.parameters, step=slow)
    (whole,) = replicas("llama-3.1-8b-h100", (replica.name, replica.method, replica.num_speculative_tokens))
    return Replica(
        replica.name, whole._calibration, replica.method, whole._config, parameters=parameters, weight=replica.weight
    )


def test_a_replica_whose_steps_explode_is_taken_out_and_comes_back() -> None:
    policy = _policy()
    play(policy, replicas(), calls(300, 10.0, 5))
    assert policy.outlier_ejection.reasons == {}
    pool = replicas()
    pool[3] = _broken(pool[3], 12.0)
    began_s = policy.clock() + 30.0
    later = [replace(call, arrived_s=began_s + call.arrived_s) for call in calls(150, 10.0, 6)]
    _, decisions = play(policy, pool, later, maintenance=1000)
    assert "steps take" in policy.outlier_ejection.reasons["e"]
    there = [one.backend == "e" for one in decisions]
    assert 3 < sum(there) < 20
    assert not any(there[-50:])
    now_s = later[-1].arrived_s + 1000.0
    policy.set_clock(lambda: now_s)
    assert [one.name for one in policy.outlier_ejection.admit(pool, now_s)] == ["b", "n", "s", "e"]
    assert policy.predictor.known["e"].slowness == 1.0


def test_a_head_that_does_not_fit_is_taken_out() -> None:
    policy, pool = _policy(guardrail={"share": 0}), _pool()[3:]
    for _ in range(40):
        policy.observe(_outcome(policy.choose(REQUEST, pool), tokens_per_step=2.8))
    fit(policy)
    for _ in range(12):
        policy.observe(_outcome(policy.choose(REQUEST, pool), tokens_per_step=1.1))
    assert "tokens per step" in policy.outlier_ejection.reasons["e"]
    assert policy.choose(REQUEST, _pool()).backend != "e"
    notes = {one.backend: one.note for one in policy.assess(REQUEST, _pool())}
    assert "ejected as an outlier: tokens per step" in notes["e"]


@pytest.mark.parametrize("arm", ["suffix:24", "ngram:5"])
def test_runaway_repetition_is_not_learned(arm: str) -> None:
    """Neither where it was written nor where lookups would have been brilliant at it."""
    policy, pool = _policy(), [_pool()[2 if arm.startswith("suffix") else 0]]
    shadow = {} if arm.startswith("suffix") else {arm: 5.9}
    long = _outcome(policy.choose(REQUEST, pool), output_tokens=8000, tokens_per_step=20.0, shadow=shadow)
    policy.observe(long)
    buckets = policy.statistics.buckets(policy.statistics.tables["acceptance"])
    assert not any(key[0] == arm for key in buckets)
    usual = {} if arm.startswith("suffix") else {arm: 1.4}
    policy.observe(_outcome(policy.choose(REQUEST, pool), tokens_per_step=1.4, shadow=usual))
    policy.observe(_outcome(policy.choose(REQUEST, pool), output_tokens=8000, tokens_per_step=1.4, shadow=usual))
    buckets = policy.statistics.buckets(policy.statistics.tables["acceptance"])
    assert sum(sums[0] for key, sums in buckets.items() if key[0] == arm) == 2


def test_many_sequences_are_no_runaway() -> None:
    policy, pool = _policy(), _pool()[3:]
    request = replace(REQUEST, n=8)
    policy.observe(_outcome(policy.choose(request, pool), request, output_tokens=8 * 220, tokens_per_step=4.0))
    assert policy.statistics.buckets(policy.statistics.tables["acceptance"])


def test_a_failure_teaches_nothing_but_leaves_the_backlog() -> None:
    policy, pool = _policy(), _pool()[3:]
    decision = policy.choose(REQUEST, pool)
    assert policy.predictor.known["e"].backlog.sent == 1
    policy.observe(_outcome(decision, status=500, output_tokens=0, tokens_per_step=None))
    assert policy.predictor.known["e"].backlog.sent == 0
    assert not [*policy.statistics.own()]


def _expected_tpot_s(policy: Learned, decision: Decision) -> float:
    """Return the time per token that a request alone on an idle backend should take there, at 2 tokens a step."""
    known = policy.predictor.known[decision.backend]
    return step_time.seconds(known.cost, step_time.terms(1.0, 400.0, 3.0)) / 2.0


def test_mild_slowness_is_forgotten_where_no_request_confirms_it() -> None:
    policy, pool, now_s = _policy(exploration={"share": 0}, guardrail={"share": 0}), _pool(), 1_000_000.0
    policy.set_clock(lambda: now_s)
    policy.choose(REQUEST, pool)
    known = policy.predictor.known["e"]
    policy.predictor.learn(replace(policy.predictor.fitted, observed={"e": 1000.0}))
    for _ in range(5):
        decision = policy.choose(REQUEST, pool[3:])
        now_s += 1.0
        policy.observe(_outcome(decision, tpot_s=2.0 * _expected_tpot_s(policy, decision)))
    slow = known.slowness
    assert slow == pytest.approx(2.0, rel=0.2)
    policy.choose(REQUEST, pool[:1])
    assert known.slowness == pytest.approx(slow)
    now_s += 30.0
    policy.choose(REQUEST, pool[:1])
    assert known.slowness == pytest.approx(1 + (slow - 1) / 8)
    now_s += 300.0
    policy.choose(REQUEST, pool[:1])
    assert known.slowness == 1.0


def test_lookups_on_a_finished_text_teach_of_backends_that_did_not_write_it() -> None:
    policy = _policy()
    for _ in range(40):
        policy.observe(_outcome(policy.choose(REQUEST, _pool()[:1]), shadow={"suffix:24": 6.0}))
    suffix = _pool()[2:3]
    policy.choose(REQUEST, suffix)
    before = policy.assess(REQUEST, suffix)[0].score
    fit(policy)
    policy.choose(REQUEST, suffix)
    tokens_per_step = policy.predictor.of(suffix[0]).acceptance(key_of(REQUEST))[0]
    assert tokens_per_step == pytest.approx(6.0, rel=0.05)
    assert f"{tokens_per_step:.2f} a step" in policy.assess(REQUEST, suffix)[0].note
    assert (policy.assess(REQUEST, suffix)[0].score or 0.0) < 0.8 * (before or 0.0)


def test_goodput_keeps_a_promise_that_latency_would_break() -> None:
    """The drafting replica would finish sooner but has a queue; the baseline speaks at once."""
    baseline, drafting = _pool()[0], _pool()[3]
    drafting.in_flight, drafting.load = 8, EngineLoad(running=6, waiting=2)
    pool, urgent = [baseline, drafting], replace(REQUEST, slo_ttft_s=0.1)
    settings = {"exploration": {"share": 0}, "guardrail": {"share": 0}}
    latency, goodput = _policy(**settings), _policy(objective="goodput", **settings)
    assert latency.choose(urgent, pool).backend == "e"
    assert goodput.choose(urgent, pool).backend == "b"
    assert goodput.choose(REQUEST, pool).backend == "e"  # without a promise there is none to keep
    by_default = _policy(objective="goodput", slo={"ttft_ms": 100}, **settings)
    assert by_default.choose(REQUEST, pool).backend == "b"
    assert by_default.choose(replace(REQUEST, slo_ttft_s=5.0), pool).backend == "e"


def test_settings_are_checked() -> None:
    for wrong in ({"calibration": "no-such"}, {"objective": "profit"}, {"slo": {"ttft_ms": 0}}, {"x": 1}):
        with pytest.raises(ValidationError):
            LearnedSettings.model_validate(wrong)
    settings = LearnedSettings(exploration=Exploration(share=0), guardrail=NO_CONTROL, slo=Slo(tpot_ms=20))
    assert Learned(settings).choose(REQUEST, _pool()).reason == "least_delay"
