"""The rules of advice: planted optima found in the simulator, and nothing where there is no support."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from backends.draft_schedule import DraftSchedule, Speculation
from backends.engine import ProbeMinute
from backends.speculation import Method
from benchmarks.routing.advice import CASES, Case, advised, measure, play
from gateway.rooms.advice.advise import advise
from gateway.rooms.advice.evidence import BackendEvidence, Contradiction, Kind, ModelEvidence, Positions, Steps
from gateway.rooms.advice.finding import Finding
from gateway.rooms.advice.losing_method import of_speculation
from policies.learned.prior import StepCost
from policies.trouble.troubles import TroubleFinding as Trouble

BUSY = tuple(ProbeMinute(100, number % 7, ((250, number % 5), (25, 60))) for number in range(30))


def case_of(name: str) -> Case:
    """Return a case with fewer requests than the benchmark has."""
    return replace(next(case for case in CASES if case.name == name), requests=900)


def of(*backends: BackendEvidence) -> ModelEvidence:
    return ModelEvidence("m", backends)


@pytest.mark.slow
def test_the_advised_k_is_within_one_of_the_best_and_gains_what_was_stated() -> None:
    case = case_of("eagle3, k = 10, code at 0")
    played = play(case, case.members, seed=1)
    finding = advise(played.evidence)[0]
    assert finding.rule == "draft_length"
    number, (method, k) = int(finding.backend[-1]), advised(finding)
    gains = {other: measure(case, played, number, (method, other), 1) for other in (k - 2, k, k + 2)}
    assert max(gains, key=gains.__getitem__) == k
    assert finding.gain.low <= gains[k] <= finding.gain.high


@pytest.mark.parametrize(
    ("arm", "shape", "problem", "thread"),
    [
        ("mtp:2", ("forced_tool", "thinking"), "failed", "41834"),
        ("dspark:7", ("tools",), "stalled", "49002"),
        ("eagle3:3", ("json_schema",), "unusable", "44993"),
        ("eagle3:3", ("images",), "unusable", "report it"),
    ],
)
def test_what_goes_wrong_is_said_with_the_thread_about_it(
    arm: str, shape: tuple[str, ...], problem: str, thread: str
) -> None:
    found = Trouble(arm, "", shape, problem, 7.0, 42.0, 38.0)
    (finding,) = advise(replace(of(), troubles=(found,)))
    assert finding.title == f"{arm}: 17% of 42 requests with {' and '.join(shape)} {problem}"
    assert thread in finding.change
    assert "38.0 s" in finding.evidence


PLAIN = (Method.BASELINE, 0)
MIXED = (PLAIN, (Method.NGRAM, 5), (Method.SUFFIX, 24), (Method.EAGLE3, 3), (Method.DRAFT_MODEL, 5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        case_of("eagle3, k = 10, code at 0"),
        case_of("eagle3, k = 10, chat at 1"),  # it costs more than it gives
        Case("five methods", MIXED, "code", 0.0, 20.0, requests=900),
    ],
    ids=lambda case: case.name,
)
def test_what_speculation_gains_is_what_the_same_requests_lose_without_it(case: Case) -> None:
    played = play(case, case.members, seed=0)
    without = play(case, [PLAIN] * len(case.members), 0, played.replica)
    gain = of_speculation(played.evidence).gain
    assert gain.low <= 1.0 - np.nanmean(played.tpot_s) / np.nanmean(without.tpot_s) <= gain.high
    early = [replace(each, steps=each.steps and replace(each.steps, answers=4.0)) for each in played.evidence.backends]
    assert of_speculation(replace(played.evidence, backends=tuple(early))).gain is None


def measured(name: str, method: Method, step_s: float, answers: float = 200.0, **known: object) -> BackendEvidence:
    """Return a replica whose steps take so long at any load, on which so many answers were measured."""
    steps = Steps(answers, step_s, (2.0, 1000.0, 10.0), StepCost(step_s, 0.0, 0.0, 0.0))
    return replace(BackendEvidence(name, method, 3, answers=answers, steps=steps), **known)  # type: ignore[arg-type]


def serving(*backends: BackendEvidence, easy: float = 1.2, hard: float = 1.2) -> ModelEvidence:
    """Return a model with two kinds of requests, which all replicas answer alike."""
    kinds = []
    for per_step in (easy, hard):
        taken = {each.name: 1.0 if each.method is Method.BASELINE else per_step for each in backends}
        kinds.append(Kind(1e5, taken, {each.name: 1.0 / len(backends) for each in backends}))
    return ModelEvidence("m", backends, tuple(kinds))


PLAIN_ONE, HEAD_ONE = measured("plain", Method.BASELINE, 0.01), measured("head", Method.EAGLE3, 0.02)


def test_where_nothing_is_certain_the_comparison_that_is_worth_most_is_named() -> None:
    tree = measured("tree", Method.SUFFIX, 0.018)
    model = serving(PLAIN_ONE, tree, easy=2.4, hard=1.6)
    (finding,) = advise(model)
    assert finding.rule == "experiment"
    assert finding.change == "gateway compare start --model m --a baseline --b suffix --for 1h"
    assert re.match(r"[+-]\d+% time expected \(95%: -\d+% to \+\d+%\), by step times of both", finding.evidence)
    assert finding.worth.endswith("the answers of both take at most 0.0% longer"), "both get half of them already"
    kinds = [replace(kind, sent={"plain": 0.25, "tree": 0.75}) for kind in model.kinds]
    (uneven,) = advise(replace(model, kinds=tuple(kinds)))
    lost = re.search(r"at most (.*)% longer", uneven.worth)
    assert lost, "a quarter of the requests moves to plain, which may be slower"
    assert float(lost[1]) > 1.0
    assert advise(replace(model, compared=frozenset([frozenset(["baseline", "suffix"])]))) == []
    assert advise(serving(PLAIN_ONE, replace(PLAIN_ONE, name="other"))) == [], "they serve alike"


def test_a_calibration_that_nobody_gave_is_compared_with_nothing() -> None:
    alone = of_speculation(serving(HEAD_ONE))
    assert alone.gain is None
    assert "no replica runs without speculation" in alone.missing
    given = replace(HEAD_ONE, baseline_cost=StepCost(0.01, 0.0, 0.0, 0.0), cost_by_k={3: StepCost(0.02, 0.0, 0.0, 0.0)})
    assert of_speculation(serving(given)).gain is not None
    early = of_speculation(serving(HEAD_ONE, measured("plain", Method.BASELINE, 0.01, 4.0)))
    assert early.gain is None
    assert "5 measured answers are needed: plain has 4" in early.missing


def test_a_replica_that_has_joined_those_of_its_arm_is_not_judged_before_its_steps_are_measured() -> None:
    known = {"positions": Positions(9000, (8000.0, 10.0, 5.0)), "cost_by_k": {3: StepCost(0.02, 0.0, 0.0, 0.0)}}
    assert advise(of(replace(HEAD_ONE, steps=None, **known))) == []  # type: ignore[arg-type]


def test_where_speculation_loses_it_is_said_what_to_do_or_what_is_missing() -> None:
    found = of_speculation(model := serving(PLAIN_ONE, HEAD_ONE))
    assert found.gain.high < 0.0
    (finding,) = advise(model)
    assert (finding.rule, finding.backend) == ("losing_method", "head")
    assert "1.20 tokens per step expected" in finding.evidence
    assert finding.gain.share == pytest.approx(1.0 - 1.2 / 2.0, abs=0.1)
    tree = measured("tree", Method.SUFFIX, 0.02, 4.0)
    partly = serving(PLAIN_ONE, replace(HEAD_ONE, name="other"), tree, easy=2.6, hard=1.1)
    assert {each.rule for each in advise(partly)} == {"experiment"}
    said = of_speculation(partly)
    assert said.gain.high < 0.0
    assert said.missing.split("; ") == [
        "other: it loses on 50% of the output tokens only, and the policy sends it the others",
        "tree: 4 of 5 answers have been measured",
    ]


def test_a_method_whose_drafts_are_refused_loses_against_the_baseline_beside_it() -> None:
    case = case_of("draft_model, a sixth accepted, and a baseline")
    played = play(case, case.members, seed=1)
    [finding] = advise(played.evidence)
    assert (finding.rule, advised(finding)) == ("losing_method", (Method.BASELINE, 0))
    assert finding.gain.low <= measure(case, played, 0, advised(finding), 1) <= finding.gain.high
    assert "method: baseline # draft_model" in finding.change


@pytest.mark.slow
def test_a_sound_pool_gets_no_advice_and_neither_do_too_few_answers() -> None:
    case = case_of("eagle3, k = 3, sound")
    assert advise(play(case, case.members, seed=1).evidence) == []
    wrong = play(case_of("eagle3, k = 10, code at 0"), case.members, seed=1).evidence
    few = replace(wrong, backends=tuple(replace(backend, answers=99.0) for backend in wrong.backends))
    assert advise(few) == []


def test_two_drafting_methods_are_not_compared_with_each_other() -> None:
    """`suffix` emits four times as many tokens per step: whether all should draft so depends on the whole pool."""
    case = case_of("eagle3, k = 3, sound")
    head, other = play(case, case.members, seed=1).evidence.backends
    tree = replace(other, name="tree", method=Method.SUFFIX, positions=None)
    assert advise(ModelEvidence("m", (head, tree), (Kind(1e6, {head.name: 2.0, "tree": 8.0}),))) == []


def of_minutes(minutes: Sequence[ProbeMinute], *flags: str) -> dict[str, Finding]:
    """Return what is found, by rule, of an engine with some minutes, which was started with some flags."""
    found = advise(of(BackendEvidence("a", Method.NGRAM, minutes=tuple(minutes), flags=flags or None)))
    return {finding.rule: finding for finding in found}


def test_waiting_for_memory_and_for_a_place_are_told_apart() -> None:
    findings = of_minutes(BUSY)
    assert set(findings) == {"memory", "batch_limit"}
    gain = findings["memory"].gain
    assert gain.low <= sum(minute.waiting_for_room for minute in BUSY) / 3000 <= gain.high
    assert findings["memory"].change == "vllm serve ... --gpu-memory-utilization 0.95"
    assert findings["batch_limit"].change == "vllm serve ... --max-num-seqs 512"
    gain = findings["batch_limit"].gain
    assert gain.low <= 2.0 / 100 <= gain.high, "none of those that wait beside 25"
    findings = of_minutes(BUSY, "--max-num-seqs", "16", "--gpu-memory-utilization=0.95")
    assert '[..., "--max-num-seqs", "32"]' in findings["batch_limit"].change
    assert '"--kv-cache-dtype", "fp8"' in findings["memory"].change
    large = [
        replace(minute, waiting_for_room=0, requests=1000, others=((300, 12), (400, 12), (700, 12))) for minute in BUSY
    ]
    more = of_minutes(large)["batch_limit"]
    assert "one of 700 places" in more.title, "more than 256 ran, so it has more places"
    assert more.change == "vllm serve ... --max-num-seqs 1400"


@pytest.mark.parametrize(
    "minutes",
    [
        BUSY[:9],
        [replace(minute, waiting_for_room=0, others=((25, 3),) * 30) for minute in BUSY],
        [*[ProbeMinute(100)] * 29, ProbeMinute(100, 5)],
    ],
    ids=["too few", "there was room", "once"],
)
def test_waiting_that_may_be_chance_is_no_finding(minutes: Sequence[ProbeMinute]) -> None:
    assert of_minutes(minutes) == {}


def test_a_pool_file_that_is_wrong_is_the_first_finding_and_all_else_about_its_replica_is_left_out() -> None:
    observed = Speculation(Method.NGRAM, DraftSchedule(3))
    found = Contradiction("the pool file says k 9, but its engine drafts with k 3", observed, "9 drafts of 27 tokens")
    wrong = BackendEvidence("wrong", Method.NGRAM, 9, contradiction=found, minutes=BUSY)
    findings = advise(of(BackendEvidence("busy", Method.NGRAM, minutes=BUSY), wrong))
    assert [(finding.rule, finding.backend) for finding in findings if finding.backend == "wrong"] == [
        ("pool_file", "wrong")
    ]
    assert findings[0].title == found.text
    assert "num_speculative_tokens: 3 # 9" in findings[0].change
