"""The tree behind distilled rules: its conditions, its size, and the weights of its leaves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from policies.distill.columns import columns_of, row_of
from policies.distill.fluid_choice import Floats, Situations
from policies.distill.support import RuleList
from policies.distill.tree import Group, _name, grow, unique_names
from policies.distill.weights import fit_weights
from policies.features.request import RequestFeatures
from policies.learned.models.keys import LIMITS, Key, key_of
from policies.rules.policy import Thresholds, ThresholdSettings
from tests.policies.distill.drawn_pool import pool, request

METHODS = ("baseline", "ngram", "suffix", "eagle3")
TARGETS = {method: [index] for index, method in enumerate(METHODS)}


def situations(
    keys: list[Key], idle_s: Floats, each_s: Floats | None = None, requests: Floats | None = None
) -> Situations:
    zeros = np.zeros_like(idle_s)
    return Situations(
        tuple(keys),
        zeros if requests is None else requests,
        idle_s,
        zeros if each_s is None else each_s,
        np.ones(len(keys)),
    )


def grown(observed: Situations, most_rules: int) -> list[Group]:
    """Return the groups of the rules that earn their place if each situation stands for many requests."""
    columns = columns_of(observed.keys)
    rows = np.array([row_of(columns, key) for key in observed.keys])
    rules = RuleList(grow(columns, rows, observed), rows, observed, 1e9, TARGETS)
    rules.drop_unearned(most_rules)
    return [group for group, _ in rules.fitted]


def test_every_request_matches_the_rule_of_its_leaf() -> None:
    """Only the lower side of a split has a condition, so earlier rules must match all of it."""
    examples = [
        request(workload=workload, structured=structured, max_tokens=limit, temperature=temperature, turns=turns)
        for workload, structured, limit, temperature, turns in itertools.product(
            ("", "chat", "code.v2"), (False, True), (None, 100, 5000), (0.0, 0.9), (1, 4)
        )
    ]

    def best(features: RequestFeatures) -> str:
        if features.workload == "code.v2":
            return "suffix" if features.turns < 2 else "ngram"
        if features.structured:
            return "ngram"
        if features.max_tokens is None:
            return "eagle3" if features.temperature < 0.5 else "baseline"
        return "suffix"

    costs = np.array([[1.0 if name == best(features) else 2.0 for name in METHODS] for features in examples])
    observed = situations([key_of(features) for features in examples], costs)
    groups = grown(observed, 12)
    rules = [
        {"name": name, "when": group.when, "weights": fit_weights(observed, group.indices, TARGETS).weights}
        for name, group in zip(unique_names(groups), groups, strict=True)
    ]
    thresholds = Thresholds(ThresholdSettings.model_validate({"rules": rules}))
    for features in examples:
        assert thresholds.choose(features, pool()).backend == best(features), features


def test_a_tree_is_as_small_as_required_and_justified() -> None:
    examples = [request(temperature=t, prompt_tokens=p) for t in (0.0, 0.5, 0.9) for p in (10, 100, 200, 400, 900)]
    keys = [key_of(features) for features in examples]
    various = situations(keys, np.random.default_rng(0).uniform(1.0, 2.0, (len(keys), 4)))
    small, large = grown(various, 4), grown(various, 12)
    assert 2 <= len(small) <= 4 < len(large) <= 12
    (single,) = grown(situations(keys, np.tile([2.0, 1.0, 3.0, 4.0], (len(keys), 1))), 4)
    assert (single.name, single.when, len(single.indices)) == ("default", {}, len(keys))
    assert len(columns_of(keys)[3].conditions) == len(LIMITS) + 1


def test_a_split_that_saves_next_to_nothing_is_none() -> None:
    """By workload there is half of the cost to save; by length, within a workload, a hundred-thousandth."""
    examples = [request(workload=workload, prompt_tokens=p) for workload in ("chat", "code") for p in (10, 900)]
    costs = np.array([[1.0, 1.00001, 2, 2], [1.00001, 1.0, 2, 2], [2.0, 2, 1.0, 1.00001], [2.0, 2, 1.00001, 1.0]])
    groups = grown(situations([key_of(features) for features in examples], costs), 12)
    assert [set(group.when) for group in groups] == [{"workload"}, set()]


def test_what_rare_requests_save_is_weighed() -> None:
    """In `code`, length saves more seconds than in `chat`, but of requests that are a thousand times as rare."""
    examples = [request(workload=workload, prompt_tokens=p) for workload in ("chat", "code") for p in (10, 900)]
    costs = np.array([[1.0, 2, 2, 2], [2.0, 1, 2, 2], [9e3, 9e3, 1000.0, 1000.5], [9e3, 9e3, 1000.5, 1000.0]])
    observed = replace(
        situations([key_of(features) for features in examples], costs), weights=np.array([1.0, 1.0, 0.001, 0.001])
    )
    assert sorted(sorted(group.indices) for group in grown(observed, 12)) == [[0], [1], [2, 3]]


def test_long_answers_do_not_take_all_the_splits() -> None:
    """They differ in their seconds, but not in their best backend; short ones differ in that."""
    long = [
        request(workload="long", prompt_tokens=p, max_tokens=limit, turns=turns, temperature=t)
        for p, limit, turns, t in itertools.product((10, 100, 400, 900, 5000), (20, 100, 900, None), (1, 4), (0.0, 0.9))
    ]
    short = [request(workload="short", structured=structured) for structured in (False, True)]
    seconds = np.random.default_rng(0).uniform(100.0, 1000.0, (len(long), 1))
    costs = np.vstack([seconds * [1.0, 2.0, 2.0, 2.0], [[1.0, 1.2, 1.2, 1.2], [1.2, 1.0, 1.2, 1.2]]])
    observed = situations([key_of(features) for features in [*long, *short]], costs)
    weights = np.ones(len(costs))
    weights[-2:] = 1e4
    groups = grown(replace(observed, weights=weights), 3)
    (plain,) = (group for group in groups if len(long) in group.indices)
    assert len(long) + 1 not in plain.indices


def test_a_rule_name_starts_with_the_workload() -> None:
    examples = [request(workload=w, prompt_tokens=p) for p in (10, 900) for w in ("chat", "code")]
    costs = np.array([[1.0, 2, 2, 2], [2.0, 1, 2, 2], [2.0, 2, 1, 2], [2.0, 2, 2, 1]])
    groups = grown(situations([key_of(features) for features in examples], costs), 4)
    with_both = [group for group in groups if {"workload", "prompt_tokens"} <= set(group.when)]
    assert with_both
    assert all(group.name.startswith(f"{group.when['workload']}-prompt") for group in with_both)
    assert len(set(unique_names(groups))) == 4


def test_rule_names_have_whole_labels_and_are_unique() -> None:
    groups = [Group(name, {}, (), np.arange(0)) for name in ("code", "code", "default", "code")]
    assert unique_names(groups) == ["code", "code-2", "default", "code-3"]
    assert _name(["chat", "prompt-below-1024", "overlap-below-0_12", "limited"]) == "chat-prompt-below-1024-limited"
    assert _name(["a" * 40, "limited"]) == "a" * 36


def test_a_tree_separates_examples_that_differ_only_under_load() -> None:
    examples = [request(prompt_tokens=tokens) for tokens in (20, 5000) for _ in range(40)]
    long = np.array([[features.prompt_tokens > 1000] for features in examples])
    idle_s = np.tile([1.0, 1.1, 1.1, 1.1], (80, 1))
    each_s = np.where(long, [0.2, 0.01, 0.01, 0.01], 0.01)
    requests = np.random.default_rng(0).uniform(0, 8, (80, 4))
    groups = grown(situations([key_of(features) for features in examples], idle_s, each_s, requests), 12)
    assert [group.when for group in groups] == [{"prompt_tokens": groups[0].when["prompt_tokens"]}, {}]
    assert all(len(set(long[group.indices, 0])) == 1 for group in groups)


def test_weights_are_recovered_from_costs_made_of_them() -> None:
    """Each cost is (requests + 10) / weight, times the seconds of the answer."""
    rng = np.random.default_rng(0)
    weights = np.array([0.4, 0.6, 0.8, 1.0])
    seconds = rng.uniform(0.5, 5.0, (200, 1))
    requests = rng.integers(0, 40, (200, 4)).astype(float)
    observed = situations([key_of(request())] * 200, 10 * seconds / weights, seconds / weights, requests)
    fitted = fit_weights(observed, np.arange(200), TARGETS)
    assert fitted.weights == pytest.approx({"eagle3": 1.0, "suffix": 0.8, "ngram": 0.6, "baseline": 0.4}, abs=0.02)
    assert list(fitted.weights) == ["eagle3", "suffix", "ngram", "baseline"]
    assert fitted.slack == pytest.approx(9.0, abs=0.1), "every score also counts the request itself"
    assert fitted.idle_s["eagle3"] == pytest.approx(10 * seconds.mean())


def test_backends_of_a_target_share_a_weight_and_slack_is_finite() -> None:
    observed = situations([key_of(request())], np.array([[4.0, 1.0, 3.0, 2.0]]))
    fitted = fit_weights(observed, np.arange(1), {"lookup": [1, 2], "head": [0, 3]})
    assert fitted.idle_s == {"lookup": 2.0, "head": 3.0}
    assert fitted.weights == {"lookup": 1.0, "head": 0.67}
    assert fitted.slack == 999.0
