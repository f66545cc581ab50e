"""A dry-run copy chooses as its policy would, and does not affect it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Policy, policies

POOL = [
    Backend("a", "m", Method.BASELINE, "http://x", weight=2.0),
    Backend("b", "m", Method.SUFFIX, "http://x"),
    Backend("c", "m", Method.EAGLE3, "http://x", num_speculative_tokens=3),
]
REQUEST = RequestFeatures("m", Endpoint.CHAT, temperature=0.2, template="t", prompt_tokens=300)
SETTINGS: dict[str, dict[str, object]] = {"static": {"method": "baseline"}}
NAMES = sorted(name for name, policy in policies().items() if policy.__module__.startswith("policies."))


def _policy(name: str) -> Policy:
    kind = policies()[name]
    seed = {"seed": 3} if "seed" in kind.Settings.model_fields else {}
    policy = kind(kind.Settings.model_validate(SETTINGS.get(name, {}) | seed))
    now_s = 1_000_000.0
    policy.set_clock(lambda: now_s)
    return policy


def _used_policy(name: str) -> Policy:
    """Return a policy that has made some choices, always the same."""
    policy = _policy(name)
    for number in range(30):
        policy.choose(_request(number), POOL)
    return policy


def _request(number: int) -> RequestFeatures:
    return replace(REQUEST, template=f"t{number % 3}", prefix=(number % 7, 100 + number), prefix_tokens=(100, 250))


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_copy_does_not_affect_the_policy(name: str) -> None:
    policy, untouched = _used_policy(name), _used_policy(name)
    assert policy.dry_run_copy().choose(_request(40), POOL) == _used_policy(name).choose(_request(40), POOL)
    dry_run_copy = policy.dry_run_copy()
    for number in range(40, 80):
        dry_run_copy.assess(_request(number), POOL)
        dry_run_copy.choose(_request(number), POOL)
    after = [policy.choose(_request(number), POOL) for number in range(100, 150)]
    assert after == [untouched.choose(_request(number), POOL) for number in range(100, 150)]


def test_a_dry_run_copy_shares_large_state_but_no_choosing_state() -> None:
    policy = Learned(LearnedSettings(seed=1))
    for number in range(30):
        policy.choose(_request(number), POOL)
    backlogs = {name: copy.copy(model.backlog) for name, model in policy.predictor.backend_models.items()}
    prefixes = {name: list(model.prefixes._used) for name, model in policy.predictor.backend_models.items()}
    dry_run_copy = policy.dry_run_copy()
    for number in range(200):
        dry_run_copy.choose(_request(1000 + number), POOL)
    assert dry_run_copy.statistics is policy.statistics
    assert {name: model.backlog for name, model in policy.predictor.backend_models.items()} == backlogs
    assert {name: list(model.prefixes._used) for name, model in policy.predictor.backend_models.items()} == prefixes
    assert dry_run_copy.rng.getstate() != policy.rng.getstate()


def test_pinned_rules_are_copied_too() -> None:
    policy, pinned = Learned(LearnedSettings(seed=1)), _policy("least_loaded")
    policy.pinned = pinned
    dry_run_copy = policy.dry_run_copy()
    assert dry_run_copy.pinned is not None
    assert dry_run_copy.pinned is not pinned
    assert dry_run_copy.choose(REQUEST, POOL).policy == "least_loaded"
