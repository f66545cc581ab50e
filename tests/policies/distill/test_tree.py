"""The tree behind distilled rules: what it asks, how large it is, and the weights of its leaves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.distill.columns import columns_of, row_of
from policies.distill.fluid_choice import Floats, Situations
from policies.distill.tree import Group, grow
from policies.distill.weights import weighed
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.buckets import LIMITS, Key, key_of
from policies.rules.policy import Thresholds, ThresholdSettings

METHODS = ("baseline", "ngram", "suffix", "eagle3")
TARGETS = {method: [place] for place, method in enumerate(METHODS)}


def pool() -> list[Backend]:
    return [Backend(name, "m", Method(name), "http://127.0.0.1:9") for name in METHODS]


def request(**features: object) -> RequestFeatures:
    return RequestFeatures("m", Endpoint.CHAT, **features)  # type: ignore[arg-type]


def situations(
    keys: list[Key], idle_s: Floats, each_s: Floats | None = None, requests: Floats | None = None
) -> Situations:
    nothing = np.zeros_like(idle_s)
    return Situations(
        tuple(keys),
        nothing if requests is None else requests,
        idle_s,
        nothing if each_s is None else each_s,
        np.ones(len(keys)),
    )


def grown(given: Situations, most: int) -> list[Group]:
    columns = columns_of(given.keys)
    return grow(columns, np.array([row_of(columns, key) for key in given.keys]), given, most)


def test_every_request_meets_the_rule_of_its_leaf() -> None:
    """The upper side of a question is not said: rules that come before must have taken the lower one."""
    asked = [
        request(workload=workload, structured=structured, max_tokens=limit, temperature=temperature, turns=turns)
        for workload, structured, limit, temperature, turns in itertools.product(
            ("", "chat", "code.v2"), (False, True), (None, 100, 5000), (0.0, 0.9), (1, 4)
        )
    ]

    def best(one: RequestFeatures) -> str:
        if one.workload == "code.v2":
            return "suffix" if one.turns < 2 else "ngram"
        if one.structured:
            return "ngram"
        if one.max_tokens is None:
            return "eagle3" if one.temperature < 0.5 else "baseline"
        return "suffix"

    costs = np.array([[1.0 if name == best(one) else 2.0 for name in METHODS] for one in asked])
    given = situations([key_of(one) for one in asked], costs)
    rules = [
        {"name": group.name, "when": group.when, "weights": weighed(given, group.places, TARGETS).weights}
        for group in grown(given, 12)
    ]
    built = Thresholds(ThresholdSettings.model_validate({"rules": rules}))
    for one in asked:
        assert built.choose(one, pool()).backend == best(one), one


def test_a_tree_is_no_larger_than_allowed_and_than_it_is_worth() -> None:
    asked = [request(temperature=t, prompt_tokens=p) for t in (0.0, 0.5, 0.9) for p in (10, 100, 200, 400, 900)]
    keys = [key_of(one) for one in asked]
    various = situations(keys, np.random.default_rng(0).uniform(1.0, 2.0, (len(keys), 4)))
    small, large = grown(various, 4), grown(various, 12)
    assert 2 <= len(small) <= 4 < len(large) <= 12
    (alone,) = grown(situations(keys, np.tile([2.0, 1.0, 3.0, 4.0], (len(keys), 1))), 4)
    assert (alone.name, alone.when, len(alone.places)) == ("default", {}, len(keys))
    assert len(columns_of(keys)[3].says) == len(LIMITS) + 1


def test_a_rules_name_says_the_workload_first() -> None:
    asked = [request(workload=w, prompt_tokens=p) for p in (10, 900) for w in ("chat", "code")]
    costs = np.array([[1.0, 2, 2, 2], [2.0, 1, 2, 2], [2.0, 2, 1, 2], [2.0, 2, 2, 1]])
    groups = grown(situations([key_of(one) for one in asked], costs), 4)
    with_both = [group for group in groups if {"workload", "prompt_tokens"} <= set(group.when)]
    assert with_both
    assert all(group.name.startswith(f"{group.when['workload']}-prompt") for group in with_both)
    assert len({group.name for group in groups}) == 4


def test_a_tree_tells_apart_what_differs_only_under_load() -> None:
    asked = [request(prompt_tokens=tokens) for tokens in (20, 5000) for _ in range(40)]
    long = np.array([[one.prompt_tokens > 1000] for one in asked])
    idle_s = np.tile([1.0, 1.1, 1.1, 1.1], (80, 1))
    each_s = np.where(long, [0.2, 0.01, 0.01, 0.01], 0.01)
    requests = np.random.default_rng(0).uniform(0, 8, (80, 4))
    groups = grown(situations([key_of(one) for one in asked], idle_s, each_s, requests), 12)
    assert [group.when for group in groups] == [{"prompt_tokens": groups[0].when["prompt_tokens"]}, {}]
    assert all(len(set(long[group.places, 0])) == 1 for group in groups)


def test_weights_say_again_what_costs_they_were_made_of() -> None:
    """Costs that are (requests + 10) / weight, times what an answer takes, whatever that is."""
    rng = np.random.default_rng(0)
    weights = np.array([0.4, 0.6, 0.8, 1.0])
    seconds = rng.uniform(0.5, 5.0, (200, 1))
    requests = rng.integers(0, 40, (200, 4)).astype(float)
    given = situations([key_of(request())] * 200, 10 * seconds / weights, seconds / weights, requests)
    found = weighed(given, np.arange(200), TARGETS)
    assert found.weights == pytest.approx({"eagle3": 1.0, "suffix": 0.8, "ngram": 0.6, "baseline": 0.4}, abs=0.02)
    assert list(found.weights) == ["eagle3", "suffix", "ngram", "baseline"]
    assert found.slack == pytest.approx(9.0, abs=0.1), "every score counts the request itself besides"
    assert found.idle_s["eagle3"] == pytest.approx(10 * seconds.mean())


def test_backends_of_one_target_share_a_weight_and_costless_requests_have_a_finite_slack() -> None:
    given = situations([key_of(request())], np.array([[4.0, 1.0, 3.0, 2.0]]))
    found = weighed(given, np.arange(1), {"lookup": [1, 2], "head": [0, 3]})
    assert found.idle_s == {"lookup": 2.0, "head": 3.0}
    assert found.weights == {"lookup": 1.0, "head": 0.67}
    assert found.slack == 999.0
