"""Why a plan is better: groups, the share at which the choice turns, and the sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from lab.options.policy import policy_reference
from lab.plan.explain import Rivals, explain
from lab.plan.judge import judged, play
from lab.plan.mixes import Kind, Mix, kinds, machine_of
from lab.plan.planning import Options, plan_windows
from lab.plan.result import Objective, Plan
from lab.plan.runner import Task, reshared
from lab.plan.search import Split
from lab.plan.traffic import Windows, group_of, sample
from lab.plan.words import to_change, verdict, why
from lab.replay.simulate import Replayed
from lab.trace import TraceRecord

H100 = load_calibration("llama-3.1-8b-h100")
SUFFIX, HEAD = 3, 6
TIMES_S: dict[Mix, dict[str, float]] = {
    (SUFFIX,) * 2: {"chat": 3.0, "code": 1.0},
    (HEAD,) * 2: {"chat": 2.0, "code": 2.0},
    (SUFFIX, HEAD): {"chat": 2.4, "code": 1.6},
}
"""Seconds by mix and group; with shares s of chat, two heads beat suffix and head above s = 0.5."""


def _traffic(chat: int, count: int = 1600) -> Windows:
    records = [
        TraceRecord(arrived_at=0.1 * number, prompt_tokens=100, output_tokens=50, temperature=0.0,
                    workload="chat" if number % 10 < chat else "code")
        for number in range(count)
    ]  # fmt: skip
    return sample(records, 4, 131_072, 0.0).windows


class Made:
    """Runs tasks with times by group."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def __call__(self, tasks: Sequence[Task]) -> list[list[Replayed]]:
        return [[self._play(task, number) for number in task.counted] for task in tasks]

    def _play(self, task: Task, number: int) -> Replayed:
        window = self.windows[number] if task.shift is None else reshared(self.windows, number, *task.shift)
        noise = np.random.default_rng((number, task.seed)).normal(1, 0.05, len(window))
        times = noise * np.array([TIMES_S[task.mix][group_of(request.features)] for request in window])
        count = len(window)
        return Replayed(
            times, times, times, np.full(count, 51), np.arange(count) % 2, 0, 1.0, np.arange(count), times,
            np.full(count, 26 if task.mix == (HEAD, HEAD) else 11),
        )  # fmt: skip


def _explained(chat: int, chosen: tuple[int, ...], rival: tuple[int, ...]) -> Plan:
    windows = _traffic(chat)
    run, split = Made(windows), Split.of(len(windows))
    played = play(list(TIMES_S), split, 2, run)
    reason = explain(Rivals(chosen, rival, split, run, Objective()), played, 2, windows)
    known: tuple[Kind, ...] = tuple(kinds(H100, machine_of(H100), 4096))
    results = tuple(judged(chosen, played, 2, Objective()))
    return Plan(known, chosen, results, (HEAD, HEAD), (SUFFIX, HEAD), None, 3, 3, reason)


def test_all_alike_is_said_plainly_with_the_traffic_that_decides_it() -> None:
    plan = _explained(8, (HEAD, HEAD), (SUFFIX, HEAD))
    loss = plan.result((SUFFIX, HEAD)).loss
    assert loss is not None
    assert loss.value == pytest.approx((0.8 * 2.4 + 0.2 * 1.6) / 2.0 - 1, abs=0.005)
    said = verdict(plan, Objective())
    assert said.startswith(
        "Run 2x eagle3 k=3: all replicas alike is best. The best of several methods, 1x suffix, 1x eagle3 k=3, takes 1"
    )
    assert plan.reason is not None
    chat, code = plan.reason.groups
    assert (chat.name, code.name) == ("chat", "code")
    assert chat.lost + code.lost == pytest.approx(loss.value)
    assert chat.lost == pytest.approx(0.8 * 0.4 / 2.0, abs=0.005)
    assert (chat.tokens_per_step[HEAD], chat.tokens_per_step[SUFFIX]) == (2.0, 5.0)
    deciding, changing = why(plan, Objective())
    assert deciding.startswith("chat (80% of the output tokens) decides it: ")
    assert "eagle3 k=3 emits 2.00, suffix emits 5.00 tokens a step" in deciding
    turn = plan.reason.turns[0]  # heads are better above 50% chat, that is below 50% code
    assert turn.group in {"chat", "code"}
    low, high = sorted((turn.still, turn.then))
    assert low - 0.02 <= 0.5 <= high + 0.02
    assert high - low < 0.11
    assert re.search(
        r"becomes the better one (above|below) a share of \d+% to \d+% (chat|code) \(now \d+%\)\.$", changing
    )


def test_the_turn_lies_on_the_right_side() -> None:
    plan = _explained(3, (SUFFIX, HEAD), (HEAD, HEAD))
    assert verdict(plan, Objective()).startswith(
        "Run 1x suffix, 1x eagle3 k=3: a mixed pool is best. The best with all replicas alike, 2x"
    )
    assert plan.reason is not None
    assert plan.reason.groups[0].name == "code"
    assert plan.reason.groups[0].served == pytest.approx({SUFFIX: 0.5, HEAD: 0.5}, abs=0.05)
    turns = {turn.group: turn for turn in plan.reason.turns}
    assert turns["chat"].then > turns["chat"].present
    assert turns["code"].then < turns["code"].present


def test_a_difference_that_may_be_chance_is_not_called_one() -> None:
    plan = _explained(5, (HEAD, HEAD), (SUFFIX, HEAD))
    assert "no mix of methods is shown to be better than all replicas alike" in verdict(plan, Objective())
    deciding, _ = why(plan, Objective())
    assert deciding.startswith("No traffic decides it: against 1x suffix, 1x eagle3 k=3 the plan is ")


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (None, None),
        ((SUFFIX, HEAD), "To change: nothing; this mix runs now."),
        ((SUFFIX, SUFFIX, SUFFIX), "To change: 2x suffix -> 1x eagle3 k=3."),
        ((HEAD,), "To change: nothing -> 1x suffix."),
    ],
)
def test_what_to_change_is_the_difference_to_the_present_mix(present: Mix | None, said: str | None) -> None:
    assert to_change(replace(_explained(3, (SUFFIX, HEAD), (HEAD, HEAD)), present=present)) == said


def test_a_plan_for_windows_of_two_workloads() -> None:
    least_loaded = policy_reference("least_loaded", None)
    present = [(Method.BASELINE, dict[str, object]())] * 2
    methods = [(Method.BASELINE, (0,)), (Method.SUFFIX, (24,)), (Method.EAGLE3, (3,))]
    planned = plan_windows(_traffic(5, 240), H100, 2, present, least_loaded, Options(methods, seeds=1, jobs=1))
    plan = planned.plan
    assert plan is not None
    assert plan.present is not None
    assert plan.reason is not None
    assert len(planned.replicas) == 2
    loss = plan.result(plan.present).loss
    assert loss is not None
    assert loss.low > 0
    assert {group.name for group in plan.reason.groups} == {"chat", "code"}
