"""The learned policy as a whole: its decisions, exploration, guardrail and outlier ejection."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from backends.backend import Backend, EngineChange, EngineLoad
from backends.speculation import Method
from benchmarks.routing.learned_rows import set_others
from policies.arm import arm_of
from policies.balancing.least_loaded import LeastLoaded
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models import step_time
from policies.learned.models.keys import key_of
from policies.learned.policy import Learned, LearnedSettings
from policies.learned.settings import Exploration, Slo
from policies.learned.shadow_drafting import ShadowBias
from policies.load_policy import LoadSettings
from policies.policy import Decision, GuardrailSettings, Outcome
from tests.support.simulated import FOUR, calls, fit, play, replicas, slowed

REQUEST = RequestFeatures("m", Endpoint.CHAT, temperature=0.0, workload="chat", template="t", prompt_tokens=300)
NO_CONTROL = GuardrailSettings(share=0)


def _pool() -> list[Backend]:
    return [Backend(name, "m", method, "http://x", num_speculative_tokens=k) for name, method, k in FOUR]


def _policy(**settings: object) -> Learned:
    policy = Learned(LearnedSettings.model_validate({"seed": 1, **settings}))
    policy.explain_candidates = True
    return policy


def propensities(decision: Decision) -> dict[str, float]:
    """Return the propensities of all candidates of a decision."""
    considered = decision.considered
    assert considered is not None
    names = [candidate.name for candidate in considered.candidates]
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


@pytest.mark.slow
def test_requests_finish_sooner_than_with_least_loaded() -> None:
    """The ratios of the mean times were 0.81 and 0.92 when this was written; the first 150 requests do not count."""
    ratios = []
    for per_s in (4.0, 20.0):
        requests = calls(600, per_s, 1)
        learned, fewest = (
            play(policy, replicas(), requests)[0].e2e_s[150:].mean()
            for policy in (_policy(), LeastLoaded(LoadSettings(seed=1)))
        )
        ratios.append(learned / fewest)
    assert np.exp(np.mean(np.log(ratios))) < 0.95


@pytest.mark.slow
def test_propensities_sum_to_one_and_match_the_observed_frequencies() -> None:
    policy = _policy(exploration={"share": 0.3, "most": 0.6}, guardrail={"share": 0.3, "block_s": 10})
    pool, times = _pool(), 4000
    for reasons in ({"control"}, {"least_delay", "explore"}):
        control = reasons == {"control"}
        now_s = next(10.0 * block for block in range(100) if policy.guardrail.by_control(10.0 * block) == control)
        policy.set_clock(lambda now_s=now_s: now_s)
        decisions = [policy.choose(REQUEST, pool) for _ in range(times)]
        expected = propensities(decisions[0])
        assert sum(expected.values()) == pytest.approx(1.0)
        seen = Counter(decision.backend for decision in decisions)
        for name, share in expected.items():
            deviation = (share * (1 - share) / times) ** 0.5
            assert seen[name] / times == pytest.approx(share, abs=4.5 * deviation)
        assert all(decision.propensity == pytest.approx(expected[decision.backend]) for decision in decisions)
        assert {decision.reason for decision in decisions} == reasons


def test_requests_that_forbid_exploration_go_to_the_best_backend() -> None:
    policy = _policy(exploration={"share": 0.5, "most": 1.0}, guardrail={"share": 0})
    pool = _pool()
    best = min(policy.assess(REQUEST, pool), key=lambda rating: rating.score or 0.0).backend
    decisions = [policy.choose(replace(REQUEST, explore=False), pool) for _ in range(300)]
    assert {(decision.backend, decision.reason, decision.propensity) for decision in decisions} == {
        (best, "least_delay", 1.0)
    }
    assert len({policy.choose(REQUEST, pool).backend for _ in range(300)}) > 1


def test_a_block_of_least_loaded_has_all_requests() -> None:
    """Single requests by another policy would neither show what it does with the pool nor leave the pool to it."""
    policy, pool = _policy(guardrail={"share": 0.5, "block_s": 10}), _pool()
    now_s = next(10.0 * block for block in range(100) if policy.guardrail.by_control(10.0 * block))
    policy.set_clock(lambda: now_s)
    decisions = [policy.choose(replace(REQUEST, explore=explore), pool) for explore in (False, True) * 50]
    assert {decision.reason for decision in decisions} == {"control"}
    assert {decision.propensity for decision in decisions} == {0.25}


def test_observations_feed_every_model() -> None:
    policy = _policy()
    assert not policy.predictor.fitted.steps
    play(policy, replicas(), calls(200, 10.0, 5))
    fit(policy)
    policy.choose(REQUEST, _pool())
    fitted = policy.predictor.fitted
    assert set(fitted.steps) == {"b", "n", "s", "e"}
    assert fitted.length.effects is not None
    assert any(arm in fitted.acceptance.arms for arm in ("eagle3:3", "suffix:24"))
    assert policy.maintenance() is None  # nothing new


def test_an_estimate_teaches_the_time_of_a_step_but_no_acceptance_and_accuses_nobody() -> None:
    policy = _policy()

    def observe(**fields: object) -> None:
        for _ in range(40):
            policy.observe(_outcome(policy.choose(REQUEST, _pool()[3:]), **fields))
        fit(policy)

    def weight(table: str) -> float:
        return sum(sums[0] for sums in policy.statistics.buckets(policy.statistics.tables[table]).values())

    observe()
    policy.choose(REQUEST, _pool())
    before = {table: weight(table) for table in ("acceptance", "length", "steps")}
    slow = {"tpot_s": 1.0, "e2e_s": 200.0}
    observe(tokens_per_step=None, is_estimated=True, steps=100, **slow)
    assert weight("acceptance") == before["acceptance"]
    assert weight("length") == pytest.approx(before["length"] + 40 / 4)
    assert weight("steps") > before["steps"]
    assert not policy.outlier_ejection.reasons
    observe(tokens_per_step=1.0, **slow)
    assert policy.outlier_ejection.reasons, "which tokens that were counted do"


def test_a_fit_pauses_between_its_parts_and_is_published_as_a_whole() -> None:
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
    assert all(models is before for models in seen)
    policy.choose(REQUEST, _pool())
    fit(at_once)
    at_once.choose(REQUEST, _pool())
    assert policy.predictor.fitted.steps == at_once.predictor.fitted.steps


def test_own_and_received_statistics_learn_the_same_as_own_alone() -> None:
    alone, shared = _policy(), _policy()
    play(alone, replicas(), calls(200, 10.0, 5))
    now_s = alone.clock()
    shared.set_clock(lambda: now_s)
    rows = [*alone.statistics.own()]
    for row in rows:
        table = alone.statistics.tables[row.table]
        assert int(now_s // table.epoch_s) >= row.epoch
    current = [row for row in rows if int(now_s // alone.statistics.tables[row.table].epoch_s) == row.epoch]
    assert len(current) == len(rows)  # all are in the current epoch, so they can be added now
    for row in rows:
        shared.statistics.add(shared.statistics.tables[row.table], row.key, *(0.3 * each for each in row.sums))
    set_others(shared.statistics, (row._replace(sums=tuple(0.7 * s for s in row.sums)) for row in rows))
    for policy in (alone, shared):
        for backend in _pool():
            policy.predictor.of(backend)
        fit(policy)
        policy.choose(REQUEST, _pool())
    ours, both = (policy.assess(REQUEST, replicas()) for policy in (alone, shared))
    assert [rating.score for rating in both] == pytest.approx([rating.score for rating in ours], rel=1e-6)


def test_a_frozen_policy_leaves_long_conversations_where_they_are_cached() -> None:
    policy, pool = _policy(), _pool()
    policy.set_clock(lambda: 1_000_000.0)  # some other blocks of time stay the policy's
    policy.guardrail.frozen = True
    warm = replace(REQUEST, prompt_tokens=6000, prefix=(1, 2), prefix_tokens=(3000, 5900))
    policy.predictor.of(pool[2]).prefixes.remember(warm.prefix, warm.prefix_tokens)
    pool[2].in_flight = 9
    assert propensities(policy.choose(warm, pool)) == {"b": 0.0, "n": 0.0, "s": 1.0, "e": 0.0}
    short = replace(warm, prompt_tokens=900, prefix=(1,), prefix_tokens=(800,))  # it costs little anywhere
    assert propensities(policy.choose(short, pool))["s"] == 0.0


def test_a_worse_policy_is_frozen_and_thaws_when_it_is_better() -> None:
    policy, pool = _policy(guardrail={"share": 0.4, "block_s": 10}), _pool()
    rng, now_s = np.random.default_rng(1), 1_000_000.0
    policy.set_clock(lambda: now_s)

    def run(slowness: float) -> list[Decision]:
        nonlocal now_s
        decisions = []
        for _ in range(2000):
            decisions.append(policy.choose(REQUEST, pool))
            now_s += 0.5
            slow = 1.0 if decisions[-1].reason in ("control", "frozen") else slowness
            policy.observe(_outcome(decisions[-1], e2e_s=0.5 * slow * float(np.exp(rng.normal(0, 0.3)))))
        return decisions

    frozen = [decision for decision in run(2.0) if decision.reason == "frozen"]
    assert policy.guardrail.frozen
    assert policy.guardrail.freezes == 1
    assert {decision.backend for decision in frozen} == {"b", "n", "s", "e"}  # least_loaded, with random ties
    assert sum(propensities(frozen[0]).values()) == pytest.approx(1.0)
    run(0.4)
    assert not policy.guardrail.frozen


def test_a_reload_keeps_a_guardrail_whose_settings_stay() -> None:
    settings = {"share": 0.4, "block_s": 10}
    before, same, other = _policy(guardrail=settings), _policy(guardrail=settings), _policy(guardrail={"share": 0.2})
    before.guardrail.frozen = True
    same.take_over(before)
    other.take_over(before)
    reasons = set()
    for block in range(40):  # some of which stay the policy's
        same.set_clock(lambda block=block: 10.0 * block + 5.0)  # type: ignore[misc]
        reasons.add(same.choose(REQUEST, _pool()).reason)
    assert "frozen" in reasons
    assert not other.guardrail.frozen
    assert other.guardrail.share() == pytest.approx(0.2)


def test_short_answers_teach_the_same_step_time_as_long_ones() -> None:
    """The first token comes with the prompt: the rest takes a step less than the answer has."""
    scales = []
    for tokens in (10, 400):
        policy = _policy()
        policy.set_clock(lambda: 1.0)
        for _ in range(200):
            decision = policy.choose(REQUEST, _pool()[:1])
            policy.observe(_outcome(decision, output_tokens=tokens, tpot_s=0.02, tokens_per_step=1.0))
        scales.append(step_time.fit_scale(policy.statistics.buckets(step_time.STEPS)))
    assert scales[0] == pytest.approx(scales[1], rel=0.03)


def test_a_replica_with_slow_steps_is_ejected_and_readmitted() -> None:
    policy = _policy()
    play(policy, replicas(), calls(300, 14.0, 5))
    assert policy.outlier_ejection.reasons == {}
    pool = replicas()
    pool[3] = slowed(pool[3], 12.0)
    began_s = policy.clock() + 30.0
    later = [replace(call, arrived_s=began_s + call.arrived_s) for call in calls(150, 14.0, 6)]
    _, decisions = play(policy, pool, later, maintenance=1000)
    assert "steps take" in policy.outlier_ejection.reasons["e"]
    sent_there = [decision.backend == "e" for decision in decisions]
    assert 3 < sum(sent_there) < 20
    assert not any(sent_there[-50:])
    now_s = later[-1].arrived_s + 1000.0
    policy.set_clock(lambda: now_s)
    assert [candidate.name for candidate in policy.outlier_ejection.admit(pool, now_s)] == ["b", "n", "s", "e"]
    assert policy.predictor.backend_models["e"].slowness == 1.0


def test_a_mismatched_draft_head_is_ejected() -> None:
    policy, pool = _policy(guardrail={"share": 0}), _pool()[3:]
    for _ in range(40):
        policy.observe(_outcome(policy.choose(REQUEST, pool), tokens_per_step=2.8))
    fit(policy)
    for _ in range(12):
        policy.observe(_outcome(policy.choose(REQUEST, pool), tokens_per_step=1.3))
    assert "tokens per step" in policy.outlier_ejection.reasons["e"]
    assert policy.choose(REQUEST, _pool()).backend != "e"
    notes = {rating.backend: rating.note for rating in policy.assess(REQUEST, _pool())}
    assert "ejected as an outlier: tokens per step" in notes["e"]


def test_texts_that_give_lookups_less_accuse_no_drafter() -> None:
    policy, pool = _policy(guardrail={"share": 0}), [one for one in _pool() if one.method is Method.NGRAM]
    (arm,) = {arm_of(one) for one in pool}
    for per_step in (2.8,) * 40 + (1.3,) * 30:
        policy.observe(_outcome(policy.choose(REQUEST, pool), tokens_per_step=per_step, shadow={arm: per_step}))
        if per_step > 2.0:
            fit(policy)
    assert not policy.outlier_ejection.reasons
    assert not policy.drafters.silent


def test_a_silent_drafter_counts_as_one_token_per_step_and_teaches_its_arm_nothing() -> None:
    policy = _policy(guardrail={"share": 0}, exploration={"share": 0})
    both = [replace(_pool()[3], name=name) for name in ("e", "e2")]
    pool = [_pool()[0], *both]
    for backend in both * 20:
        policy.observe(_outcome(policy.choose(REQUEST, [backend]), tokens_per_step=2.8))
    fit(policy)
    policy.choose(REQUEST, both)
    key = key_of(REQUEST)
    healthy = policy.predictor.tokens_per_step("e", key)
    while "e" not in policy.drafters.silent:
        policy.observe(_outcome(policy.choose(REQUEST, both[:1]), tokens_per_step=1.0))
    for _ in range(50):
        policy.observe(_outcome(policy.choose(REQUEST, both[:1]), tokens_per_step=1.0))
    fit(policy)
    assert policy.choose(REQUEST, pool).backend == "e2"
    assert policy.predictor.tokens_per_step("e", key) == 1.0
    assert policy.predictor.tokens_per_step("e2", key) == pytest.approx(healthy, rel=0.01)
    assert policy.outlier_ejection.reasons == {}
    notes = {rating.backend: rating.note for rating in policy.assess(REQUEST, pool)}
    assert "its drafter is silent: 1.00 tokens per step where 2." in notes["e"]
    assert "silent" not in notes["e2"]
    policy.engine_changed("e", EngineChange.RESTART)
    assert policy.predictor.tokens_per_step("e", key) == pytest.approx(healthy, rel=0.01)


@pytest.mark.slow
def test_kinds_on_which_a_method_never_gains_accuse_no_drafter() -> None:
    """Neither one that is new, nor one of which it is known."""
    policy, pool = _policy(guardrail={"share": 0}), _pool()[3:]
    poems = replace(REQUEST, workload="poems", temperature=1.0)
    for request, per_step in [(REQUEST, 2.8)] * 40 + [(poems, 1.02)] * 100:
        policy.observe(_outcome(policy.choose(request, pool), request, tokens_per_step=per_step))
        fit(policy)
    assert policy.drafters.silent == {}
    assert policy.predictor.tokens_per_step("e", key_of(poems)) < 1.3


def test_what_shadow_drafting_gives_on_a_text_accuses_a_lookup_drafter() -> None:
    policy, pool = _policy(guardrail={"share": 0}), _pool()[1:2]
    for replayed in (1.0, 2.0):
        for _ in range(12):
            decision = policy.choose(REQUEST, pool)
            policy.observe(_outcome(decision, tokens_per_step=1.0, shadow={"ngram:5": replayed}))
        assert list(policy.drafters.silent) == (["n"] if replayed > 1 else [])


@pytest.mark.parametrize("arm", ["suffix:24", "ngram:5"])
def test_runaway_repetition_is_not_learned(arm: str) -> None:
    """Neither for the backend that generated it, nor for an arm that shadow drafting finds excellent at it."""
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


def test_many_sequences_are_not_runaway_repetition() -> None:
    policy, pool = _policy(), _pool()[3:]
    request = replace(REQUEST, n=8)
    policy.observe(_outcome(policy.choose(request, pool), request, output_tokens=8 * 220, tokens_per_step=4.0))
    assert policy.statistics.buckets(policy.statistics.tables["acceptance"])


def test_a_failed_request_is_not_learned_from_but_leaves_the_backlog() -> None:
    policy, pool = _policy(), _pool()[3:]
    decision = policy.choose(REQUEST, pool)
    assert policy.predictor.backend_models["e"].backlog.sent == 1
    policy.observe(_outcome(decision, status=500, output_tokens=0, tokens_per_step=None))
    assert policy.predictor.backend_models["e"].backlog.sent == 0
    assert not [*policy.statistics.own()]


def _expected_tpot_s(policy: Learned, decision: Decision) -> float:
    """Return the expected time per token of a request alone on its backend, at 2 tokens per step."""
    model = policy.predictor.backend_models[decision.backend]
    return step_time.seconds(model.cost, step_time.terms(1.0, 400.0, 3.0)) / 2.0


def test_unconfirmed_mild_slowness_decays() -> None:
    policy, pool, now_s = _policy(exploration={"share": 0}, guardrail={"share": 0}), _pool(), 1_000_000.0
    policy.set_clock(lambda: now_s)
    policy.choose(REQUEST, pool)
    model = policy.predictor.backend_models["e"]
    policy.predictor.learn(replace(policy.predictor.fitted, observed={"e": 1000.0}))
    for _ in range(5):
        decision = policy.choose(REQUEST, pool[3:])
        now_s += 1.0
        policy.observe(_outcome(decision, tpot_s=2.0 * _expected_tpot_s(policy, decision)))
    slow = model.slowness
    assert slow == pytest.approx(2.0, rel=0.2)
    policy.choose(REQUEST, pool[:1])
    assert model.slowness == pytest.approx(slow)
    now_s += 30.0
    policy.choose(REQUEST, pool[:1])
    assert model.slowness == pytest.approx(1 + (slow - 1) / 8)
    now_s += 300.0
    policy.choose(REQUEST, pool[:1])
    assert model.slowness == 1.0


def test_shadow_drafting_teaches_about_other_backends() -> None:
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
    assert f"{tokens_per_step:.2f} per step" in policy.assess(REQUEST, suffix)[0].note
    assert (policy.assess(REQUEST, suffix)[0].score or 0.0) < 0.8 * (before or 0.0)


def test_goodput_meets_an_slo_that_latency_misses() -> None:
    """The drafting replica would finish sooner but has a queue; the baseline starts at once."""
    baseline, drafting = _pool()[0], _pool()[3]
    drafting.in_flight, drafting.load = 8, EngineLoad(running=6, waiting=2)
    pool, urgent = [baseline, drafting], replace(REQUEST, slo_ttft_s=0.1)
    settings = {"exploration": {"share": 0}, "guardrail": {"share": 0}}
    latency, goodput = _policy(**settings), _policy(objective="goodput", **settings)
    assert latency.choose(urgent, pool).backend == "e"
    assert goodput.choose(urgent, pool).backend == "b"
    assert goodput.choose(REQUEST, pool).backend == "e"  # no SLO to meet
    by_default = _policy(objective="goodput", slo={"ttft_ms": 100}, **settings)
    assert by_default.choose(REQUEST, pool).backend == "b"
    assert by_default.choose(replace(REQUEST, slo_ttft_s=5.0), pool).backend == "e"


def test_where_requests_are_urgent_delaying_them_costs_more() -> None:
    scores = {}
    for objective in ("latency", "goodput"):
        policy, pool = _policy(objective=objective, exploration={"share": 0}, guardrail={"share": 0}), _pool()[:1]
        pool[0].in_flight = 20
        for _ in range(20):
            policy.choose(replace(REQUEST, slo_ttft_s=1e-3), pool)
        scores[objective] = policy.assess(REQUEST, pool)[0].score or 0.0
    assert scores["goodput"] > 1.001 * scores["latency"]


def test_the_prompt_of_a_request_is_no_load_on_its_own_answer() -> None:
    """It is computed before the first token; the prompts of others that came meanwhile are a load."""
    now_s, policy, pool = 0.0, _policy(exploration={"share": 0}, guardrail={"share": 0}), _pool()[:1]
    policy.set_clock(lambda: now_s)
    request = replace(REQUEST, prompt_tokens=20_000)
    prompts_before_end = []
    for others in (0, 1):
        decisions = [policy.choose(request, pool) for _ in range(1 + others)]
        now_s += 2.0
        policy.observe(_outcome(decisions[0], request, tokens_per_step=1.0))
        prompts_before_end.append(policy.statistics.buckets(step_time.STEPS)[("b",)][5] - sum(prompts_before_end))
    assert prompts_before_end[0] == 0.0
    assert prompts_before_end[1] > 0.0


def test_settings_are_validated() -> None:
    for invalid in ({"calibration": "no-such"}, {"objective": "profit"}, {"slo": {"ttft_ms": 0}}, {"x": 1}):
        with pytest.raises(ValidationError):
            LearnedSettings.model_validate(invalid)
    settings = LearnedSettings(exploration=Exploration(share=0), guardrail=NO_CONTROL, slo=Slo(tpot_ms=20))
    assert Learned(settings).choose(REQUEST, _pool()).reason == "least_delay"


def test_answers_that_show_too_much_are_corrected_and_those_before_forgotten() -> None:
    """The answers of one replica show 3 tokens per step where its engine counts 2; another one of its arm shows 2."""
    policy = _policy(exploration={"share": 0}, guardrail={"share": 0})
    pool = [Backend(name, "m", Method.EAGLE3, "http://x", num_speculative_tokens=3) for name in ("wrong", "right")]

    def answer_all(count: int) -> dict[str, float]:
        for _ in range(count):
            for backend, shown in zip(pool, (3.0, 2.0), strict=True):
                decision = policy.follow(Decision(backend.name, "test", "test"), REQUEST, pool)
                policy.observe(_outcome(decision, tokens_per_step=shown))
        fit(policy)
        policy.assess(REQUEST, pool)  # it takes over the fit
        return {each.name: policy.predictor.tokens_per_step(each.name, key_of(REQUEST)) for each in pool}

    assert answer_all(100)["wrong"] > 2.8
    policy.correct("wrong", 2 / 3)
    own = {row.key for row in policy.statistics.own() if row.table in {"acceptance", "steps"} and "wrong" in row.key}
    assert own == set()
    believed = answer_all(30)
    assert believed["wrong"] == pytest.approx(2.0, rel=0.05)
    assert believed["right"] == pytest.approx(2.0, rel=0.05)
    policy.correct("wrong", 1.0)
    assert answer_all(300)["wrong"] > 2.2


@pytest.mark.parametrize(("measured", "replayed"), [(2.0, 3.0), (3.0, 2.0)])
def test_replays_are_corrected_by_what_engines_had_on_the_same_texts(measured: float, replayed: float) -> None:
    bias = ShadowBias()
    for _ in range(1000):
        bias.compare("suffix:24", measured, replayed)
    assert bias.corrected("suffix:24", replayed) == pytest.approx(measured, rel=0.05)
    assert bias.corrected("ngram:5", replayed) == replayed


def test_a_price_is_that_of_the_tokens_and_of_the_delay_of_others() -> None:
    policy, pool = _policy(), _pool()
    idle = policy.price(REQUEST, pool)
    assert min(idle) > 0
    assert policy.price(replace(REQUEST, prompt_tokens=50 * REQUEST.prompt_tokens), pool).prompt_s > 10 * idle.prompt_s
    busy = [replace(backend, in_flight=8) for backend in pool]
    assert policy.price(REQUEST, busy).expected_s() > 1.1 * idle.expected_s()
    assert idle.at_s(2 * idle.output_tokens) == pytest.approx(2 * idle.expected_s() - idle.prompt_s)
