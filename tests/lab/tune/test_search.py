"""Numbers in rules that can be tuned, and the search for better ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from lab.tune.search import numbers, search, with_numbers
from policies.rules.policy import ThresholdSettings

RULES = ThresholdSettings.model_validate(
    {
        "stale_after_s": 3.0,
        "rules": [
            {"name": "few", "when": {"max_tokens": "<= 16"}, "prefer": ["baseline"]},
            {"name": "one", "when": {"n": "= 1", "top_p": ">= 0.2 and < 0.9"}, "prefer": ["suffix"]},
            {"name": "copies", "when": {"overlap": ">= 0.9", "workload": ["chat"]}, "prefer": ["suffix"]},
            {"name": "rest", "weights": {"suffix": 1.0, "eagle3": 0.5}, "slack": 20},
        ],
    }
)
OVERLAP = ".rules.2.when.overlap.>="


def test_bounds_weights_and_slacks_are_tunable_but_not_exact_numbers_or_words() -> None:
    assert numbers(RULES) == {
        ".spill.slack": 8.0,
        ".spill.ratio": 1.25,
        ".rules.0.when.max_tokens.<=": 16.0,
        ".rules.1.when.top_p.>=": 0.2,
        ".rules.1.when.top_p.<": 0.9,
        OVERLAP: 0.9,
        ".rules.3.weights.suffix": 1.0,
        ".rules.3.weights.eagle3": 0.5,
        ".rules.3.slack": 20.0,
    }


def test_only_the_given_numbers_change() -> None:
    assert with_numbers(RULES, {}) == RULES
    moved = with_numbers(RULES, {OVERLAP: 0.25, ".spill.slack": 3.0, ".rules.3.weights.eagle3": 0.75})
    assert moved is not None
    assert str(moved.rules[2].when) == "overlap >= 0.25, workload chat"
    assert (moved.spill.slack, moved.rules[3].weights) == (3.0, {"suffix": 1.0, "eagle3": 0.75})
    assert (moved.rules[:2], moved.stale_after_s) == (RULES.rules[:2], 3.0)
    assert with_numbers(RULES, {".rules.1.when.top_p.>=": 0.95}) is None  # can never hold


def distance(settings: ThresholdSettings) -> float:
    return 1.0 + abs(numbers(settings)[OVERLAP] - 0.3)


@pytest.mark.slow
def test_the_search_finds_a_better_number_and_keeps_those_that_do_not_help() -> None:
    seen: list[ThresholdSettings] = []

    def score_all(tried: Sequence[ThresholdSettings]) -> list[float]:
        seen.extend(tried)
        return [distance(one) for one in tried]

    found = search(score_all, RULES, 40, 0)
    assert seen[0] == RULES
    assert 0.2 < numbers(found)[OVERLAP] < 0.4
    assert {**numbers(found), OVERLAP: 0.9} == numbers(RULES)
    assert search(score_all, RULES, 40, 0) == found  # the same seed


def test_settings_that_are_out_of_the_question_are_not_chosen() -> None:
    found = search(
        lambda tried: [math.inf if numbers(one)[OVERLAP] < 0.5 else distance(one) for one in tried], RULES, 40, 0
    )
    assert 0.5 <= numbers(found)[OVERLAP] < 0.7
    assert search(lambda tried: [1.0] * len(tried), RULES, 5, 0) == RULES
