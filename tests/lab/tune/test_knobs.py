"""Tunable numbers in rules, their scores, and the search for better ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from backends.speculation import Method
from lab.replay.request import ReplayRequest, replay_request
from lab.replay.simulate import Replayed, ReplicaSpec
from lab.trace import TraceRecord
from lab.tune.knobs import Goal, Scoring, knobs, with_values
from lab.tune.search import PlayAll, Search, Task, Window, WindowRunner, windows_of
from policies.load_policy import LoadSettings
from policies.rules.policy import ThresholdSettings

CALIBRATION = "llama-3.1-8b-h100"
BUDGET = 6_000_000
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
    """Return requests; suffix drafting suits those with overlap above 0.5, and `top_p` and `max_tokens` are unknown."""
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


def test_bounds_are_tunable_but_not_exact_numbers_or_words() -> None:
    found = {knob.name: knob for knob in knobs(RULES)}
    assert list(found) == [
        "few.max_tokens.high", "one.top_p.low", "one.top_p.high", "copies.overlap.low", "spill.slack", "spill.ratio",
    ]  # fmt: skip
    assert (found["few.max_tokens.high"].least, found["few.max_tokens.high"].most) == (2.0, 128.0)
    assert all(knob.least <= knob.present <= knob.most for knob in found.values())


def test_only_the_given_numbers_change() -> None:
    moved = with_values(RULES, {"copies.overlap.low": 0.25, "spill.slack": 3.0})
    assert str(moved.rules[2].when) == "overlap >= 0.25, workload chat"
    assert moved.spill.slack == 3.0
    assert (moved.rules[:2], moved.rules[3]) == (RULES.rules[:2], RULES.rules[3])
    assert with_values(RULES, {}) == RULES
    with pytest.raises(ValueError, match="can never hold"):
        with_values(RULES, {"one.top_p.low": 0.95})


def test_weights_and_slack_of_a_rule_are_tunable() -> None:
    rule = {"name": "all", "weights": {"suffix": 1.0, "eagle3": 0.5}, "slack": 20}
    rules = ThresholdSettings.model_validate({"rules": [rule]})
    found = {knob.name: knob for knob in knobs(rules)}
    assert list(found) == ["all.weights.suffix", "all.weights.eagle3", "all.slack", "spill.slack", "spill.ratio"]
    assert (found["all.weights.eagle3"].least, found["all.weights.eagle3"].most) == (0.25, 1.0)
    moved = with_values(rules, {"all.weights.eagle3": 0.75, "all.slack": 3.0})
    assert moved.rules[0].weights == {"suffix": 1.0, "eagle3": 0.75}
    assert moved.rules[0].slack == 3.0
    assert with_values(rules, {}) == rules


def play_all(made: Sequence[ReplayRequest], pool: Sequence[ReplicaSpec] = POOL) -> PlayAll:
    runner = WindowRunner(pool, made, seed=0)
    return lambda tasks: list(map(runner, tasks))


def rules(made: Sequence[ReplayRequest], settings: ThresholdSettings) -> Replayed:
    return play_all(made)([Task("thresholds", settings, Window(0, len(made)))])[0]


MEAN = Scoring(Goal.MEAN, {})


def search(made: Sequence[ReplayRequest], goal: Goal = Goal.MEAN, pool: Sequence[ReplicaSpec] = POOL) -> Search:
    return Search(play_all(made, pool), Scoring(goal, {}), windows_of(len(made), 1, 1), RULES, budget=10**6)


@pytest.mark.slow
def test_the_search_finds_a_better_bound_and_keeps_the_other_numbers() -> None:
    made = requests(120)
    found = search(made).run(25, 1)
    assert (found.asked, found.trials) == (25, (25,))
    tuned = {knob.name: knob.present for knob in knobs(found.settings)}
    assert 0.3 < tuned["copies.overlap.low"] < 0.7  # the truth is 0.5
    present = {knob.name: knob.present for knob in knobs(RULES)}
    assert tuned["one.top_p.low"] == present["one.top_p.low"]
    assert tuned["few.max_tokens.high"] == present["few.max_tokens.high"]
    rest = requests(120, seed=9)
    after, before = rules(rest, found.settings), rules(rest, RULES)
    assert MEAN([after]) < 0.95 * MEAN([before])
    assert search(made).run(25, 1) == found  # the same seed


def test_scores_follow_the_goal_over_all_results() -> None:
    made = requests(60)
    first, second = (rules(part, RULES) for part in (made[:40], made[40:]))
    e2e_s = np.concatenate([first.e2e_s, second.e2e_s])
    assert MEAN([first, second]) == pytest.approx(e2e_s.mean())
    assert Scoring(Goal.P99, {})([first, second]) == pytest.approx(np.percentile(e2e_s, 99))
    half = Scoring(Goal.GOODPUT, {"e2e": float(np.median(e2e_s))})
    assert half([first, second]) == pytest.approx(0.5)
    unserved = replace(second, errors=20)  # miss the SLO as well
    assert half([first, unserved]) == pytest.approx(1 - 30 / 80)
    idle = play_all(made)([Task("least_loaded", LoadSettings(seed=0), Window(0, 60))])[0]
    assert MEAN([idle]) != pytest.approx(e2e_s.mean())


def test_windows_are_spread_evenly_over_each_rung() -> None:
    windows = windows_of(100_000, trials=100, budget=1_500_000)
    in_order = sorted(windows)
    each = windows[0].stop - windows[0].start
    assert (len(windows), {window.stop - window.start for window in windows}) == (18, {each})
    assert 1000 < each < 100_000 // 18
    assert 100_000 - in_order[-1].stop == pytest.approx(in_order[0].start, abs=2)
    gaps = {after.start - before.start for before, after in pairwise(in_order)}
    assert max(gaps) - min(gaps) <= 1
    assert [in_order.index(window) for window in windows[:6]] == [4, 13, 1, 7, 10, 16]
    # the budget, if a third of the trials is promoted, and a third of these
    assert 100 * each * (2 + 4 / 3 + 12 / 9) == pytest.approx(1_500_000, rel=0.4)
    whole = sorted(windows_of(100_000, 100, 10**9))
    assert all(after.start - before.stop in {0, 1} for before, after in pairwise(whole))


def made_up(bad: Collection[int] = ()) -> tuple[PlayAll, list[Task]]:
    """Return a synthetic play function: best at a bound of 0.3, with errors below 0.2 in windows starting in `bad`."""
    seen: list[Task] = []

    def play(tasks: Sequence[Task]) -> list[Replayed]:
        played = []
        for task in tasks:
            seen.append(task)
            assert isinstance(task.settings, ThresholdSettings)
            low = next(knob.present for knob in knobs(task.settings) if knob.name == "copies.overlap.low")
            count = task.window.stop - task.window.start - task.window.lead
            e2e_s = np.full(count, 1.0 + abs(low - 0.3) + 0.01 * (task.window.start % 7))
            errors = int(low < 0.2 and task.window.start in bad)
            played.append(
                Replayed(
                    e2e_s,
                    e2e_s,
                    e2e_s,
                    np.full(count, 9),
                    np.zeros(count, np.int64),
                    errors,
                    1.0,
                    np.arange(count),
                    e2e_s,
                )
            )
        return played

    return play, seen


def bound(settings: ThresholdSettings) -> float:
    return {knob.name: knob.present for knob in knobs(settings)}["copies.overlap.low"]


@pytest.mark.slow
def test_the_best_third_of_the_trials_goes_on_within_the_budget() -> None:
    play, seen = made_up()
    windows = windows_of(600_000, 60, BUDGET)
    found = Search(play, MEAN, windows, RULES, BUDGET).run(60, 0)
    assert found.asked == 60 >= found.trials[0] > 50
    assert 12 <= found.trials[1] <= 30
    assert 4 <= found.trials[2] <= 15
    assert bound(found.settings) == pytest.approx(0.3, abs=0.05)
    assert sum(task.window.stop - task.window.start for task in seen) < 1.2 * BUDGET
    short = Search(play, MEAN, windows, RULES, budget=BUDGET // 4).run(60, 0)
    assert short.asked < 60


def test_settings_that_leave_requests_unserved_are_rejected() -> None:
    play, _ = made_up(bad=range(600_000))
    found = Search(play, MEAN, windows_of(600_000, 40, BUDGET), RULES, BUDGET).run(40, 0)
    assert bound(found.settings) >= 0.2


def test_drafting_on_texts_is_replayed_once_for_all_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    text = list(range(50))
    record = TraceRecord(prompt_tokens=50, output_tokens=40, prompt_token_ids=text, output_token_ids=text[:40])
    made = [replay_request(record, 0.5 * n, 0.0) for n in range(5)]
    runner = WindowRunner(POOL, made, 0)
    task = Task("thresholds", RULES, Window(0, 5))
    first = runner(task)
    monkeypatch.setattr("lab.replay.request.SuffixCache", None)
    assert runner(task).e2e_s.tolist() == first.e2e_s.tolist()
