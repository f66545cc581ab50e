"""A guardrail and outlier ejection around policies that know of neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from backends.backend import Backend, Candidate, EngineChange
from backends.speculation import Method
from benchmarks.virtual_time import fit
from policies.build import Guarded, build
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.detector import REST_S
from policies.policy import Decision, Outcome, Policy, PolicySettings, policies
from policies.roles import Explainer, Learner, Maintained
from policies.rules.policy import Thresholds

REQUEST = RequestFeatures("m", Endpoint.CHAT, temperature=0.0, workload="chat", template="t", prompt_tokens=300)
BLOCKS = {"share": 0.4, "block_s": 10}
FOUR = (("b", Method.BASELINE, 0), ("n", Method.NGRAM, 5), ("s", Method.SUFFIX, 24), ("e", Method.EAGLE3, 3))


def _pool() -> list[Backend]:
    return [Backend(name, "m", method, "http://x", num_speculative_tokens=k) for name, method, k in FOUR]


def _guarded(name: str, **settings: object) -> Guarded:
    policy = build(name, policies()[name].Settings.model_validate(settings))
    assert isinstance(policy, Guarded)
    policy._rng.seed(1)
    return policy


def _outcome(decision: Decision, e2e_s: float = 1.0) -> Outcome:
    method = next(backend.method for backend in _pool() if backend.name == decision.backend)
    return Outcome(REQUEST, decision, method, 200, 0.05, 0.005, e2e_s, 300, 200, 2.0)


def test_a_policy_is_wrapped_only_if_its_settings_ask_for_it() -> None:
    assert isinstance(build("thresholds", policies()["thresholds"].Settings()), Thresholds)
    learned = build("learned", policies()["learned"].Settings())
    assert isinstance(learned, Explainer)
    assert learned.guardrail is not None
    assert not isinstance(learned, Guarded)
    guardrail = _guarded("thresholds", guardrail={"share": 0.1})
    assert (guardrail.name, guardrail.text_features) == ("thresholds", guardrail.policy.text_features)
    assert guardrail.statistics is None
    assert _guarded("thresholds", outlier_ejection=True).statistics is not None


def test_a_worse_policy_is_frozen() -> None:
    policy, pool, reasons = _guarded("static", method="eagle3", guardrail=BLOCKS), _pool(), set[str]()
    for number in range(2000):
        policy.set_clock(lambda now_s=0.5 * number: now_s)
        decision = policy.choose(REQUEST, pool)
        seconds = 1.0 if decision.reason == "configured" else 0.5
        policy.observe(_outcome(decision, seconds * (1.0 + 0.01 * (number % 7))))
        reasons.add(decision.reason)
    assert reasons == {"configured", "control", "frozen"}
    assert policy.guardrail.frozen


@pytest.mark.parametrize("name", ["thresholds", "power_of_two", "static"])
def test_propensities_match_the_observed_frequencies(name: str) -> None:
    settings = {"method": "suffix"} if name == "static" else {}
    policy, pool, times = _guarded(name, seed=2, guardrail=BLOCKS, **settings), _pool(), 2000
    pool[0].in_flight = pool[3].in_flight = 3
    for control in (True, False):
        now_s = next(10.0 * block for block in range(100) if policy.guardrail.by_control(10.0 * block) == control)
        policy.set_clock(lambda now_s=now_s: now_s)
        decisions = [policy.choose(REQUEST, pool) for _ in range(times)]
        assert ({decision.reason for decision in decisions} == {"control"}) == control
        seen = Counter(decision.backend for decision in decisions)
        expected = {decision.backend: decision.propensity for decision in decisions}
        assert sum(expected.values()) == pytest.approx(1.0)
        assert expected == pytest.approx({"n": 0.5, "s": 0.5}) if control else True
        for decision in decisions:
            assert decision.propensity == pytest.approx(expected[decision.backend])
        for backend, share in expected.items():
            assert seen[backend] / times == pytest.approx(share, abs=4.5 * (share * (1 - share) / times) ** 0.5)


def test_a_replica_with_slow_steps_is_ejected() -> None:
    policy, pool, chosen = _guarded("round_robin", outlier_ejection=True), _pool(), list[str]()
    for number in range(400):
        policy.set_clock(lambda now_s=0.1 * number: now_s)
        decision = policy.choose(REQUEST, pool)
        is_slow = number >= 300 and decision.backend == "e"
        policy.observe(replace(_outcome(decision), tpot_s=0.06 if is_slow else 0.005))
        chosen.append(decision.backend)
        if number % 25 == 0 and number < 300:
            assert policy.detector.reasons == {}
            fit(policy)
    assert "e" not in chosen[-50:]
    notes = {rating.backend: rating.note for rating in policy.assess(REQUEST, pool)}
    assert "its steps take" in notes["e"]


class Learning(Policy, Learner, Maintained):
    """Finds its memo in every outcome of a decision of its own."""

    name = "learning"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self.memos: list[object] = []
        self.fits = 0

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        return Decision(candidates[-1].name, self.name, "last", memo="mine")

    def observe(self, outcome: Outcome) -> None:
        self.memos.append(outcome.decision.memo)

    def maintenance(self) -> None:
        self.fits += 1


def test_a_policy_that_learns_is_passed_its_own_memos_and_maintained() -> None:
    inner = Learning(PolicySettings.model_validate({"guardrail": BLOCKS, "outlier_ejection": True}))
    policy = Guarded(inner)
    policy._rng.seed(1)
    assert isinstance(policy, Learner)
    assert isinstance(policy, Maintained)
    decisions = []
    for number in range(200):
        policy.set_clock(lambda now_s=float(number): now_s)
        decisions.append(policy.choose(REQUEST, _pool()))
    for decision in decisions:
        policy.observe(_outcome(decision))
    assert {decision.reason for decision in decisions} == {"last", "control"}
    assert Counter(inner.memos) == {
        "mine": sum(decision.reason == "last" for decision in decisions),
        None: len([decision for decision in decisions if decision.reason == "control"]),
    }
    fit(policy)
    assert inner.fits == 1
    assert policy.statistics is not None
    assert policy.statistics.observations > 100


def test_a_silent_drafter_gets_nothing_while_it_rests() -> None:
    policy = _guarded("least_loaded", outlier_ejection=True, seed=1)
    now_s = 100.0
    policy.set_clock(lambda: now_s)
    for per_step, times in ((2.4, 60), (1.0, 8)):
        for _ in range(times):
            policy.detector.observe_drafts("e", ("eagle3:3", "", ""), 2.4, per_step, None, (0, 0), None, now_s)
    pool = [replace(_pool()[3], name=name) for name in ("e", "f")]
    assert {policy.choose(REQUEST, pool).backend for _ in range(20)} == {"f"}
    assert policy.preview(REQUEST, pool).backend == "f"
    now_s += REST_S
    assert {policy.choose(REQUEST, pool).backend for _ in range(20)} == {"e", "f"}
    policy.engine_changed("e", EngineChange.WAKE_UP)
    assert policy.detector.silent == {}
