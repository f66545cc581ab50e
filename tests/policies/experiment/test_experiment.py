"""Requests are given to arms in proportion, conversations stay, and what blocks show is what was so."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, permutations
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.decision import Decision, Outcome
from policies.experiment.blocks import STAYS
from policies.experiment.curve import Crossing, Point
from policies.experiment.evidence import BLOCKS, USUAL, Evidence, Sums, best_first
from policies.experiment.experiment import Experiment
from policies.experiment.plan import Plan
from policies.experiment.verdict import Finding, Stage, _sentence, verdict_of
from policies.features.request import Endpoint, RequestFeatures
from policies.statistics import Statistics

START_S = 1_700_000_000.0
PLAN = Plan("one", ("plain", "head"), (frozenset({"a", "b"}), frozenset({"c", "d"})))
POOL = [Backend(name, "llama", Method.BASELINE, f"http://127.0.0.1:800{at}") for at, name in enumerate("abcd")]


class Stand:
    """A pool of which replica c and d take `ratio` times as long, and its clock."""

    def __init__(self, plan: Plan = PLAN, ratio: float = 1.0, seed: int = 0, seconds: float = 2.0) -> None:
        self.now_s = START_S
        self.plan, self.ratio, self.seconds = plan, ratio, seconds
        self.rng = Random(seed)
        self.statistics = Statistics([BLOCKS], lambda: self.now_s)
        self.experiment = Experiment(plan, self.statistics, seed)
        self.failing, self.failing_share = "", 0.3

        self.times = 1  # as many tokens of replica c and d

    def send(self, request: RequestFeatures | None = None, candidates: list[Backend] = POOL) -> str:
        """Send a request, which ends at once by its clock, and return its replica."""
        request = request or RequestFeatures("llama", Endpoint.CHAT)
        name = self.rng.choice(self.experiment.give(request, candidates).candidates).name
        tokens = self.rng.randint(50, 200) * (self.times if name in "cd" else 1)
        seconds = self.seconds * tokens / 100 * self.rng.uniform(0.8, 1.2) * (self.ratio if name in "cd" else 1.0)
        status = 500 if name in self.failing and self.rng.random() < self.failing_share else 200
        decision = Decision(name, "least_loaded", "")
        began_s, self.now_s = self.now_s, self.now_s + seconds
        self.experiment.observe(
            Outcome(request, decision, Method.BASELINE, status, 0.1, 0.02, seconds, 100, tokens, 1.0)
        )
        self.now_s = began_s
        return name

    def run(self, minutes: float, per_s: float = 4.0) -> Evidence:
        """Play some minutes."""
        for _ in range(int(minutes * 60 * per_s)):
            self.send()
            self.now_s += 1.0 / per_s
        return Evidence(self.plan, self.statistics)


def test_requests_are_given_to_arms_and_beside_them_as_likely_as_it_tells() -> None:
    plan = Plan("two", ("a", "rest"), (frozenset("a"), frozenset("bc")), explore=1.0, usual=False)
    stand, seen, counts = Stand(plan), set[tuple[str, float]](), Counter[str]()
    for _ in range(1200):
        given = stand.experiment.give(RequestFeatures("llama", Endpoint.CHAT), POOL)
        seen.add((given.arm, round(given.chance, 3)))
        counts[given.arm] += 1
        stand.now_s += 1.0
    assert counts == pytest.approx({"a": 300, "rest": 600, "": 300}, rel=0.15)
    # One, two and one replicas, of which some count double and others half in blocks with uneven shares.
    even, more, less = ((1, 2, 1), (2, 1, 1), (0.5, 4, 1))
    assert seen == {
        (arm, round(each[at] / sum(each), 3)) for each in (even, more, less) for at, arm in enumerate(("a", "rest", ""))
    }


def test_a_cycle_of_blocks_has_even_shares_more_for_each_and_one_as_usual() -> None:
    for first in (0, 600, 6_000_000):
        shares = [PLAN.shares(number) for number in range(first, first + 6)]
        assert Counter(shares) == {(1.0, 1.0): 3, (1.25, 0.8): 1, (0.8, 1.25): 1, None: 1}
    assert [PLAN.shares(n) for n in range(60)] != [Plan("other", PLAN.arms, PLAN.groups).shares(n) for n in range(60)]


def test_a_conversation_stays_in_its_group_and_a_prompt_that_comes_again_does_not() -> None:
    stand = Stand(Plan("three", PLAN.arms, PLAN.groups, usual=False))
    (first, then) = (RequestFeatures("llama", Endpoint.CHAT, prefix=each) for each in ((5, 6), (5, 6, 7)))
    assert [round(stand.experiment.give(each, POOL).chance, 1) for each in (first, then)] != [1.0, 1.0]
    assert stand.experiment.give(then, POOL).chance == 1.0
    for talk in range(40):
        turns = [
            RequestFeatures("llama", Endpoint.CHAT, prefix=tuple(range(talk * 99, talk * 99 + n))) for n in (2, 3, 5)
        ]
        assert len({stand.plan.group_of(stand.send(turn)) for turn in turns}) == 1
    again = RequestFeatures("llama", Endpoint.CHAT, prefix=(1_000_001, 1_000_002))
    assert len({stand.plan.group_of(stand.send(again)) for _ in range(40)}) == 2


def test_a_conversation_is_given_anew_after_some_blocks() -> None:
    stand, groups = Stand(Plan("three", PLAN.arms, PLAN.groups, usual=False)), dict[int, set[int]]()
    turns = (RequestFeatures("llama", Endpoint.CHAT, prefix=(*range(1, number),)) for number in range(3, 200))
    for turn in turns:
        groups.setdefault(int(stand.now_s // 60) // STAYS, set()).add(stand.plan.group_of(stand.send(turn)))
        stand.now_s += 30.0
    assert all(len(each) == 1 for each in groups.values())
    assert {*chain(*groups.values())} == {0, 1}


@pytest.mark.slow
def test_long_conversations_that_take_unlike_times_make_no_arm_better() -> None:
    """Ten conversations, of which each takes its own time for a token: of four comparisons, none finds a difference."""
    for seed in range(4):
        stand = Stand(seed=seed, seconds=0.5)
        paces = [stand.rng.lognormvariate(0.0, 0.3) for _ in range(10)]
        for turn in range(1, 1500):
            for talk, stand.seconds in enumerate(paces):
                prefix = tuple(talk * 10_000 + each for each in range(max(0, turn - 3), turn + 1))
                stand.send(RequestFeatures("llama", Endpoint.CHAT, prefix=prefix))
                stand.now_s += 0.3
            if turn % 100 == 0:
                verdict = verdict_of(Evidence(PLAN, stand.statistics), 0.02)
                assert verdict.stage is Stage.RUNNING, verdict.sentence


def test_a_system_prompt_that_once_came_alone_makes_no_conversation_of_all_that_have_it() -> None:
    stand = Stand(Plan("three", PLAN.arms, PLAN.groups, usual=False))
    stand.send(RequestFeatures("llama", Endpoint.CHAT, prefix=(7,)))  # and a picture, which is no text
    others = [RequestFeatures("llama", Endpoint.CHAT, prefix=(7, number)) for number in range(1000, 1400)]
    counts = Counter(stand.plan.group_of(stand.send(each)) for each in others)
    assert 100 < counts[0] < 300, "in a block in which one group gets a quarter more"


def test_a_group_that_is_away_gets_nothing_and_others_serve() -> None:
    stand = Stand(Plan("four", PLAN.arms, PLAN.groups, usual=False))
    assert {stand.send(candidates=POOL[:2]) for _ in range(40)} == {"a", "b"}


def test_settings_that_rotate_have_every_group_in_turn() -> None:
    plan = Plan("five", ("0", "1", "3"), (frozenset("ab"), frozenset("cd")), rotates=True)
    for start in range(0, 30, 3):
        for group in (0, 1):
            assert {plan.arm_of(group, number) for number in range(start, start + 3)} == {"0", "1", "3"}
        assert all(plan.arm_of(0, number) != plan.arm_of(1, number) for number in range(start, start + 3))


@pytest.mark.parametrize("arms", [*permutations("0135")])
def test_all_arms_are_ordered_whatever_their_order_was(monkeypatch: pytest.MonkeyPatch, arms: tuple[str, ...]) -> None:
    evidence = Evidence(replace(PLAN, arms=arms), Statistics([BLOCKS], lambda: START_S))

    def fit(first: str, second: str) -> Any:
        ratio = (1.0 + int(second)) / (1.0 + int(first))  # the deeper, the faster
        return SimpleNamespace(overall=lambda _: SimpleNamespace(ratio=ratio))

    monkeypatch.setattr(evidence, "fit", fit)
    assert best_first(evidence) == [*"5310"]


@pytest.mark.slow
def test_the_better_arm_is_found_and_what_comparing_costs() -> None:
    evidence = Stand(ratio=0.9).run(90)
    assert set(evidence.blocks[min(evidence.blocks)]) <= {"plain", "head", USUAL}
    assert best_first(evidence) == ["head", "plain"]
    verdict = verdict_of(evidence, 0.02)
    assert verdict.stage is Stage.DECIDED
    assert verdict.findings[0].at_mean.low < 0.9 < verdict.findings[0].at_mean.high
    assert verdict.sentence.startswith("head takes ")
    # By Little's law: 4 requests a second on 4 replicas, 2.5 s each of "plain" and 2.25 s of "head".
    assert verdict.findings[0].at_mean.in_flight == pytest.approx(2.37, rel=0.05)
    cost = evidence.cost(0.95)
    assert cost.low < 1.0 < cost.high


@pytest.mark.slow
def test_arms_that_are_equal_are_said_to_be() -> None:
    verdict = verdict_of(Stand(seed=1).run(180), 0.045)
    assert verdict.stage is Stage.ALIKE
    assert "differ by less than 4.5% " in verdict.sentence


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_failures_of_one_arm_end_it(share: float) -> None:
    stand = Stand()
    stand.failing, stand.failing_share = "cd", share
    verdict = verdict_of(stand.run(12), 0.02)
    assert verdict.stage is Stage.HARM
    assert "of the requests of head failed, 0.0% of the others" in verdict.sentence


def test_a_request_that_fails_late_counts_for_the_arm_that_it_was_sent_to() -> None:
    """Each block is another arm's turn, and the blocks as usual are nobody's."""
    plan = Plan("late", ("one", "other"), (), rotates=True, explore=0.0)
    stand = Stand(plan)
    sent = Counter[str]()
    for _ in range(120):
        number = int(stand.now_s // 60)
        sent[USUAL if plan.shares(number) is None else plan.arm_of(0, number)] += 1
        stand.now_s += 150.0
        stand.experiment.failed("a", 150.0)
        stand.now_s -= 90.0
    seen = Counter[str]()
    for (_, arm), sums in stand.experiment._sums.items():
        seen[arm] += int(sums.failed)
    assert seen == sent


def blocks_of(plan: Plan, count: int, harm: dict[str, float], harmed: range) -> Evidence:
    """Return blocks in which each arm has much the same requests, but those of the first in some of them."""
    statistics = Statistics([BLOCKS], lambda: START_S)
    for number in range(100, 100 + count):
        arms = [plan.arm_of(0, number)] if plan.rotates else [*plan.arms]
        for arm in arms:
            usual = {"chosen": 500.0, "replicas": 1000.0, "judged": 50.0}
            usual |= harm if number - 100 in harmed and arm == arms[0] else {}
            statistics.add(BLOCKS, (plan.id, str(number), arm, "one"), *Sums(25.0, 5000.0, 50.0, 5000.0, 1.0, **usual))
    return Evidence(plan, statistics)


TURNS = Plan("turns", ("learned", "least_loaded"), (), rotates=True, explore=0.0, usual=False)


@pytest.mark.parametrize(
    ("plan", "harm", "harmed", "is_harm"),
    [
        (PLAN, {"failed": 60.0}, range(1), False),  # an engine has crashed, once
        (PLAN, {"failed": 1.0}, range(60), False),  # 0.2% of the requests
        (PLAN, {"failed": 200.0}, range(3), True),
        (PLAN, {"missed": 45.0}, range(2), False),  # two blocks are no six
        (TURNS, {"failed": 60.0}, range(1), False),
        (TURNS, {"missed": 45.0}, range(1), False),  # a burst of traffic
    ],
)
def test_what_happens_once_or_seldom_is_no_harm(
    plan: Plan, harm: dict[str, float], harmed: range, *, is_harm: bool
) -> None:
    for blocks in (6, 100):
        verdict = verdict_of(blocks_of(plan, blocks, harm, harmed), 0.02)
        assert (verdict.stage is Stage.HARM) is is_harm
        assert verdict.harmed == ("plain" if is_harm else "")


def test_nothing_is_claimed_at_first_and_at_its_end_without_evidence() -> None:
    evidence = Stand().run(2)
    assert verdict_of(evidence, 0.02).stage is Stage.RUNNING
    ended = verdict_of(evidence, 0.02, is_over=True)
    assert ended.stage is Stage.OVER
    assert ended.sentence.startswith("Nothing is known: each arm needs")


def test_blocks_that_are_too_short_for_the_requests_show_nothing() -> None:
    stand = Stand(seconds=20.0)
    assert not stand.run(30).blocks
    assert stand.experiment.needed_block_s() == pytest.approx(8 * 25, rel=0.2)
    assert len(stand.experiment._sums) < 20, "and nothing is kept of them"


def test_an_arm_that_does_not_keep_up_is_found_though_no_block_is_long_enough_for_it() -> None:
    stand = Stand(seconds=0.5)
    for minute in range(40):
        stand.ratio = 1.0 + 4.0 * minute  # a queue that grows
        stand.run(1)
    verdict = verdict_of(Evidence(PLAN, stand.statistics), 0.02)
    assert (verdict.stage, verdict.harmed) == (Stage.HARM, "head")
    assert "times as long as those of plain, in each of the last blocks" in verdict.sentence


@pytest.mark.slow
def test_nothing_is_said_where_clients_send_one_arm_other_requests() -> None:
    stand = Stand(seconds=0.2)
    assert stand.run(20).times_the_work("plain", "head") == 1.0
    stand = Stand(seconds=0.2)
    stand.times = 3
    verdict = verdict_of(stand.run(60), 0.02)
    assert verdict.stage is Stage.RUNNING
    assert "0.3 times the work of those of head" in verdict.sentence or "3.0 times the work" in verdict.sentence


@pytest.mark.slow
def test_a_few_long_requests_are_no_harm() -> None:
    """With six requests of an arm in a block, one arm takes twice as long as the other by chance."""
    stand = Stand(seed=3)
    stand.rng.uniform = lambda a, b: stand.rng.lognormvariate(-0.5, 1.0)  # type: ignore[method-assign]
    for _ in range(60):
        assert verdict_of(stand.run(4, per_s=0.4), 0.02).stage is not Stage.HARM


@pytest.mark.parametrize(
    ("crossing", "words"),
    [
        (None, "but head takes longer at 9.0."),
        (Crossing(5.02, 4.0, 6.0, 0), "head pays up to 5.0 in flight per replica"),
    ],
)
def test_loads_at_which_the_better_arm_loses_are_named(crossing: Crossing | None, words: str) -> None:
    at = Point(3.0, 1.0, 0.8, 0.7, 0.9)
    finding = Finding(
        "head", "plain", at, [Point(1.0, 0.5, 0.9, 0.7, 1.2), at, Point(9.0, 3.0, 1.2, 1.1, 1.3)], crossing
    )
    decided, alike, over = (_sentence(finding, stage, 0.02) for stage in (Stage.DECIDED, Stage.ALIKE, Stage.OVER))
    assert "which is not certain: that takes more time (--for)" in over
    assert f"(99%: 10.0% to 30.0%); {words}" in decided
    assert f"differ by less than 2% at 3.0 requests in flight per replica; {words}" in alike


def test_requests_that_end_in_the_next_block_are_not_taken_for_its_kind() -> None:
    statistics = Statistics([BLOCKS], lambda: START_S)
    for number in range(60):
        arms = [USUAL] if PLAN.shares(number) is None else ["plain", "head"]
        for arm in (*arms, *({"plain", "head", USUAL} - {*arms})):
            seconds, work = (50.0 * 2 / len(arms), 5000.0 * 2 / len(arms)) if arm in arms else (90.0, 100.0)
            sums = Sums(seconds, work, 50.0, work, 1.0, 50.0, 100.0)
            statistics.add(BLOCKS, (PLAN.id, str(number), arm, "process"), *sums)
    cost = Evidence(PLAN, statistics).cost(0.95)
    assert cost.control == 10
    assert cost.low < 1.0 < cost.high


def test_blocks_must_be_longer_for_an_arm_of_which_few_requests_end_in_them() -> None:
    statistics = Statistics([BLOCKS], lambda: START_S)
    for number in range(4):
        for arm, requests in (("plain", 50.0), ("head", 3.0)):
            sums = Sums(requests, requests, requests, requests, 1.0, 50.0, 100.0)
            statistics.add(BLOCKS, (PLAN.id, str(number), arm, "one"), *sums)
    assert Evidence(PLAN, statistics).needed_block_s() == 4 * PLAN.block_s


def test_shorter_blocks_count_when_it_goes_on_with_longer_ones() -> None:
    stand = Stand(ratio=0.9, seconds=1.0)
    before = stand.run(30).blocks
    longer = replace(PLAN, id="longer", block_s=84.0, before=replace(PLAN))
    stand.plan = longer
    stand.experiment.go_on(longer)
    evidence = stand.run(30)
    assert len(before) > 25
    assert [number for number in evidence.blocks if number < 0] == sorted(evidence.blocks)[: len(before)]
    assert [*map(len, before.values())] == [len(evidence.blocks[each]) for each in evidence.blocks if each < 0]
    assert [longer.shares(each) for each in evidence.blocks if each < 0] == [PLAN.shares(each) for each in before]
    found = evidence.fit("head", "plain")
    assert found is not None
    assert found.work_per_s == pytest.approx(1.19, rel=0.03), "seconds of work each second"
    assert found.overall(0.95).low < 0.9 < found.overall(0.95).high


def test_an_arm_that_is_away_is_not_said_to_get_less_work() -> None:
    stand = Stand(Plan("away", PLAN.arms, PLAN.groups, block_s=10.0), seconds=0.2)
    stand.run(2, per_s=2.0)
    for _ in range(10 * 60 * 2):
        stand.send(candidates=POOL[:2])
        stand.now_s += 0.5
    assert stand.run(1, per_s=2.0).times_the_work("plain", "head") == 1.0


@pytest.mark.slow
def test_an_arm_of_one_replica_with_few_requests_is_not_said_to_get_less_work() -> None:
    plan = Plan("small", ("pair", "one"), (frozenset({"a", "b"}), frozenset({"c"})), block_s=10.0)
    stand = Stand(plan, seconds=0.2, seed=5)
    for _ in range(6):
        evidence = stand.run(40, per_s=2.0)
        assert evidence.times_the_work("pair", "one") == 1.0


def test_gateways_add_up_what_they_see() -> None:
    one, two = Stand(seed=1), Stand(seed=2)
    one.run(20)
    two.run(20)
    for table, epoch in two.statistics.take_changed():
        one.statistics.set_others_of(table, epoch, {row.key: row.sums for row in two.statistics.own_of(table, epoch)})
    both, alone = Evidence(PLAN, one.statistics), Evidence(PLAN, two.statistics)
    assert both.blocks.keys() == alone.blocks.keys()
    assert both.total("head").chosen > 1.5 * alone.total("head").chosen
    assert both.fit("plain", "head") is not None


@pytest.mark.parametrize(("per_s", "is_enough"), [(0.5, False), (4.0, True)])
def test_blocks_must_be_longer_where_requests_are_few(per_s: float, *, is_enough: bool) -> None:
    stand = Stand(Plan("ten", PLAN.arms, PLAN.groups, block_s=20.0))
    assert stand.run(0.5, per_s).needed_block_s() is None, "it is not known yet"
    assert stand.run(4, per_s).needed_block_s() == (None if is_enough else 80.0)
