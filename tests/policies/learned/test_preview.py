"""Explaining changes nothing in `learned`."""

from __future__ import annotations

import copy
from dataclasses import replace

from backends.backend import Backend
from backends.speculation import Method
from policies.build import build
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import policies

POOL = [
    Backend("a", "m", Method.BASELINE, "http://x", weight=2.0),
    Backend("b", "m", Method.SUFFIX, "http://x"),
    Backend("c", "m", Method.EAGLE3, "http://x", num_speculative_tokens=3),
]
REQUEST = RequestFeatures("m", Endpoint.CHAT, temperature=0.2, template="t", prompt_tokens=300, slo_tpot_s=0.006)


def _request(number: int) -> RequestFeatures:
    return replace(REQUEST, template=f"t{number % 3}", prefix=(number % 7, 100 + number), prefix_tokens=(100, 250))


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
