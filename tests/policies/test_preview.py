"""Explaining changes nothing: a policy decides the same with and without it, and as it said."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.decision import Decision, Outcome
from policies.features.request import Endpoint, RequestFeatures
from policies.guarded.policy import Guarded, build
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Policy, policies
from policies.roles import Clocked, Learner, assess, preview

POOL = [
    Backend("a", "m", Method.BASELINE, "http://x", weight=2.0),
    Backend("b", "m", Method.SUFFIX, "http://x"),
    Backend("c", "m", Method.EAGLE3, "http://x", num_speculative_tokens=3),
]
REQUEST = RequestFeatures("m", Endpoint.CHAT, temperature=0.2, template="t", prompt_tokens=300, slo_tpot_s=0.006)
GUARDED = {"guardrail": {"share": 0.3, "block_s": 5}, "outlier_ejection": True}
NAMES = sorted(name for name, policy in policies().items() if policy.__module__.startswith("policies."))
CASES = [
    *[(name, {"method": "baseline"} if name == "static" else {}) for name in NAMES],
    (
        "learned",
        {"objective": "goodput", "guardrail": {"share": 0.3, "block_s": 5}, "exploration": {"share": 0.1, "most": 0.3}},
    ),
    ("least_loaded", GUARDED),
    ("round_robin", GUARDED),
    ("thresholds", GUARDED),
]


def _request(number: int) -> RequestFeatures:
    return replace(REQUEST, template=f"t{number % 3}", prefix=(number % 7, 100 + number), prefix_tokens=(100, 250))


def _run(name: str, settings: dict[str, object], *, explain: bool) -> list[Decision]:
    """Use a policy for 150 requests; from the 60th on, "c" is slow."""
    kind = policies()[name]
    seed = {"seed": 3} if "seed" in kind.Settings.model_fields else {}
    policy: Policy = build(name, kind.Settings.model_validate(settings | seed))
    if isinstance(policy, Guarded):
        policy._rng.seed(3)  # not every policy has a seed
    now_s = 1_000_000.0
    if isinstance(policy, Clocked):
        policy.set_clock(lambda: now_s)
    decisions: list[Decision] = []
    for number in range(150):
        now_s += 0.7
        for index, backend in enumerate(POOL):
            backend.in_flight = (number * (index + 2)) % 5
        request = _request(number)
        if explain:
            for other in range(3):
                assess(policy, _request(1000 + other), POOL)
                preview(policy, _request(1000 + other), POOL[other:])
            expected = preview(policy, request, POOL)
        decisions.append(policy.choose(request, POOL))
        if explain:
            assert expected == decisions[-1]
        if isinstance(policy, Learner) and number > 3:
            tpot_s = 0.08 if number > 60 and decisions[number - 3].backend == "c" else 0.004
            observed = Outcome(request, decisions[number - 3], Method.EAGLE3, 200, 0.05, tpot_s, 1.0, 300, 200, 2.0)
            policy.observe(observed)
    return decisions


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_explaining_changes_no_decision_and_foretells_the_next(name: str, settings: dict[str, object]) -> None:
    assert _run(name, settings, explain=True) == _run(name, settings, explain=False)


def test_explaining_changes_neither_backlog_nor_prefixes_nor_randomness() -> None:
    policy = Learned(LearnedSettings(seed=1))
    for number in range(30):
        policy.choose(_request(number), POOL)

    def state() -> object:
        models = policy.predictor.backend_models
        backlogs = {name: copy.copy(model.backlog) for name, model in models.items()}
        prefixes = {name: list(model.prefixes._used) for name, model in models.items()}
        return backlogs, prefixes, policy.rng.getstate(), list(policy.statistics.own())

    before = state()
    for number in range(200):
        policy.preview(_request(1000 + number), POOL)
        policy.assess(_request(1000 + number), POOL)
    assert state() == before


def test_pinned_rules_are_explained_in_place_of_the_policy() -> None:
    policy = Learned(LearnedSettings(seed=1))
    policy.pinned = build("least_loaded", policies()["least_loaded"].Settings())
    assert policy.preview(REQUEST, POOL).policy == "least_loaded"
    assert "in flight" in policy.assess(REQUEST, POOL)[0].note
