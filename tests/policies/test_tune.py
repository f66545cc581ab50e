"""Numbers in rules, searched: which may be moved, that what helps is found, and that the rest is left alone."""

from __future__ import annotations

import numpy as np
import pytest

from backends.speculation import Method
from policies.policy import policies
from policies.replay import ReplicaSpec
from policies.replay_request import ReplayRequest, replay_request
from policies.thresholds import ThresholdSettings
from policies.trace import TraceRecord
from policies.tune import Goal, Trial, knobs, mean_ratio, search, with_values

CALIBRATION = "llama-3.1-8b-h100"
POOL = [
    ReplicaSpec("plain", Method.BASELINE, {}, CALIBRATION),
    ReplicaSpec("tree", Method.SUFFIX, {}, CALIBRATION),
    ReplicaSpec("head", Method.EAGLE3, {"num_speculative_tokens": 3}, CALIBRATION),
]
RULES = ThresholdSettings.model_validate(
    {
        "rules": [
            {"name": "few", "when": {"max_tokens": "<= 16"}, "prefer": ["baseline"]},
            {"name": "one", "when": {"n": "= 1", "top_p": ">= 0.2 and < 0.9"}, "prefer": ["suffix"]},
            {"name": "copies", "when": {"overlap": ">= 0.9", "workload": ["chat"]}, "prefer": ["suffix"]},
            {"name": "rest", "prefer": ["eagle3"]},
        ],
    }
)


def requests(count: int, seed: int = 3) -> list[ReplayRequest]:
    """Requests of which lookups copy those with an overlap above a half; nothing tells of `top_p` or `max_tokens`."""
    rng = np.random.default_rng(seed)
    made = []
    for arrived_s in np.cumsum(rng.exponential(0.4, count)):
        overlap = float(rng.uniform())
        copied = overlap > 0.5
        made.append(
            replay_request(
                TraceRecord(
                    temperature=0.0, workload="chat", overlap=overlap, template="0badcafe", prompt_tokens=200,
                    output_tokens=int(rng.integers(50, 200)),
                    acceptance={"suffix": 6.0 if copied else 1.1, "eagle3": 1.4 if copied else 3.0},
                ),
                float(arrived_s), 0.0,
            )
        )  # fmt: skip
    return made


def test_bounds_may_be_moved_but_not_exact_numbers_or_words() -> None:
    found = {knob.name: knob for knob in knobs(RULES)}
    assert list(found) == [
        "few.max_tokens.high", "one.top_p.low", "one.top_p.high", "copies.overlap.low", "spill.slack", "spill.ratio",
    ]  # fmt: skip
    assert (found["few.max_tokens.high"].least, found["few.max_tokens.high"].most) == (2.0, 128.0)
    assert all(knob.least <= knob.present <= knob.most for knob in found.values())


def test_numbers_are_put_in_place_and_nothing_else_changes() -> None:
    moved = with_values(RULES, {"copies.overlap.low": 0.25, "spill.slack": 3.0})
    assert str(moved.rules[2].when) == "overlap >= 0.25, workload chat"
    assert moved.spill.slack == 3.0
    assert (moved.rules[:2], moved.rules[3]) == (RULES.rules[:2], RULES.rules[3])
    assert with_values(RULES, {}) == RULES
    with pytest.raises(ValueError, match="can never hold"):
        with_values(RULES, {"one.top_p.low": 0.95})


def test_weights_and_slack_of_a_rule_may_be_moved() -> None:
    rule = {"name": "all", "weights": {"suffix": 1.0, "eagle3": 0.5}, "slack": 20}
    rules = ThresholdSettings.model_validate({"rules": [rule]})
    found = {knob.name: knob for knob in knobs(rules)}
    assert list(found) == ["all.weights.suffix", "all.weights.eagle3", "all.slack", "spill.slack", "spill.ratio"]
    assert (found["all.weights.eagle3"].least, found["all.weights.eagle3"].most) == (0.25, 1.0)
    moved = with_values(rules, {"all.weights.eagle3": 0.75, "all.slack": 3.0})
    assert moved.rules[0].weights == {"suffix": 1.0, "eagle3": 0.75}
    assert moved.rules[0].slack == 3.0
    assert with_values(rules, {}) == rules


def test_what_helps_is_found_and_the_rest_left_alone() -> None:
    trial = Trial(POOL, requests(120), Goal.MEAN, {}, 0)
    scores: list[float] = []
    tuned = search(trial, RULES, 25, 1, scores.append)
    assert len(scores) == 25
    assert scores == sorted(scores, reverse=True)
    found = {knob.name: knob.present for knob in knobs(tuned)}
    assert 0.3 < found["copies.overlap.low"] < 0.7  # the truth is 0.5
    present = {knob.name: knob.present for knob in knobs(RULES)}
    assert found["one.top_p.low"] == present["one.top_p.low"]
    assert found["few.max_tokens.high"] == present["few.max_tokens.high"]
    rest = Trial(POOL, requests(120, seed=9), Goal.MEAN, {}, 0)
    after, before = rest.rules(tuned), rest.rules(RULES)
    assert after.score < 0.95 * before.score
    ratio = mean_ratio(after.played, before.played, 0)
    assert ratio is not None
    assert ratio.value == pytest.approx(after.score / before.score)
    assert ratio.high < 1
    assert search(trial, RULES, 25, 1) == tuned  # the same seed


def test_rules_that_cannot_be_bettered_are_kept() -> None:
    only = [ReplicaSpec("plain", Method.BASELINE, {}, CALIBRATION)]
    assert search(Trial(only, requests(20), Goal.P99, {}, 0), RULES, 5, 0) is RULES


def test_scores_are_of_the_goal() -> None:
    made = requests(60)
    settings = RULES.model_copy(update={"seed": 0})
    e2e_s = Trial(POOL, made, Goal.MEAN, {}, 0).rules(settings).played.e2e_s
    assert Trial(POOL, made, Goal.MEAN, {}, 0).rules(settings).score == pytest.approx(e2e_s.mean())
    assert Trial(POOL, made, Goal.P99, {}, 0).rules(settings).score == pytest.approx(np.percentile(e2e_s, 99))
    bound = float(np.median(e2e_s))
    assert Trial(POOL, made, Goal.GOODPUT, {"e2e": bound}, 0).rules(settings).score == pytest.approx(0.5)
    least_loaded = policies()["least_loaded"]
    chosen = least_loaded(least_loaded.Settings.model_validate({"seed": 0}))
    assert Trial(POOL, made, Goal.MEAN, {}, 0).policy(chosen).score != pytest.approx(e2e_s.mean())
