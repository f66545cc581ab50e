"""Where `learned` sends requests, what it learns, and what it tells."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import yaml
from pydantic import ValidationError

from backends.backend import Backend, EngineChange, EngineLoad
from backends.speculation import Method
from policies.build import predicted_s
from policies.checks import check_policy
from policies.decision import Decision
from policies.learned import thresholds
from policies.learned.policy import Learned
from policies.learned.replica import STEPS
from policies.learned.settings import LearnedSettings
from policies.learned.table import PER_STEP
from policies.learned.thresholds import MOST_RULES, NothingLearnedError, in_words, kinds_of, rules_of
from policies.rules.policy import Thresholds, ThresholdSettings
from tests.policies.learned.pool import STEP_S, Pool, answer, request


def test_it_keeps_what_the_gateway_relies_on_for_goodput_too() -> None:
    check_policy("learned", {"objective": "goodput", "slo": {"ttft_ms": 300, "tpot_ms": 20}}, 1)


def taught() -> Pool:
    pool = Pool()
    pool.teach(request("code"), suffix=4.0, ngram=2.5, eagle3=1.8)
    pool.teach(request("chat"), suffix=1.2, ngram=1.1, eagle3=2.6)
    return pool


def test_each_workload_goes_where_it_is_fastest() -> None:
    pool = taught()
    assert pool.policy.choose(request("code"), pool.backends).backend == "suffix"
    assert pool.policy.choose(request("chat"), pool.backends).backend == "eagle3"


def test_the_delay_of_others_counts() -> None:
    pool = taught()
    costs = [pool.costs(request("chat"))["eagle3"]]
    eagle3 = pool.backends[-1]
    for _ in range(3):
        eagle3.in_flight += 8
        costs.append(pool.costs(request("chat"))["eagle3"])
    assert all(less < more for less, more in pairwise(costs))
    eagle3.in_flight = 200
    assert pool.policy.choose(request("chat"), pool.backends).backend != "eagle3"


def test_those_that_wait_in_an_engine_count_while_its_report_is_new_and_they_can_still_wait() -> None:
    pool = Pool()
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 16, 3], [17, 256, 0]]}
    pool.backends[-1] = eagle3 = Backend("eagle3", "m", Method.EAGLE3, "http://a", 3, schedule)
    eagle3.in_flight = 68
    reports = [EngineLoad(8, waiting, at_s=at_s) for waiting, at_s in ((0, math.inf), (60, math.inf), (60, 0.0))]
    costs = []
    for eagle3.load in reports:
        costs.append(pool.costs(request())["eagle3"])
    assert costs[1] > 5 * costs[0]
    assert costs[2] == costs[0]
    eagle3.in_flight = 3  # their clients have left since
    costs = []
    for eagle3.load in reports:
        costs.append(pool.costs(request())["eagle3"])
    assert costs == [costs[0]] * 3


def test_requests_sent_to_a_full_engine_wait_too_and_one_that_just_arrived_is_no_queue() -> None:
    pool, costs = Pool(), []
    eagle3 = pool.backends[-1]
    eagle3.in_flight = 68
    for running, waiting in ((8, 60), (8, 20), (60, 8), (60, 0)):
        eagle3.load = EngineLoad(running, waiting, at_s=math.inf)
        costs.append(pool.costs(request())["eagle3"])
    assert costs[0] == costs[1] > 2 * costs[2]
    assert costs[2] == costs[3]


def test_a_clock_that_is_set_back_changes_neither_waits_nor_the_loads_that_answers_met() -> None:
    costs, asked = [], request(prefix=(1,), prefix_tokens=(200,))
    for back_s in (0.0, 3600.0):
        pool = Pool()
        pool.backends[-1].in_flight = 19
        pool.send("eagle3", asked)
        pool.policy.sent_elsewhere("eagle3", asked.prefix, asked.prefix_tokens)
        pool.now_s -= back_s
        for _ in range(2):
            pool.send("eagle3", asked)
        costs.append(pool.costs(asked)["eagle3"])
        (met,) = [sums[17] / sums[0] for sums in pool.policy.statistics.buckets(STEPS).values()]
        assert met == pytest.approx(20.0, rel=0.05)
    assert costs[1] == pytest.approx(costs[0], rel=1e-3)


def test_what_was_sent_to_an_engine_before_it_turned_out_to_be_another_is_not_taken_from_the_new_one() -> None:
    pool = Pool()
    eagle3 = pool.backends[-1]
    eagle3.in_flight = 4
    sent = [pool.policy.follow(Decision("eagle3", "x", "y"), request(), [eagle3]) for _ in range(2)]
    pool.policy.engine_changed("eagle3", EngineChange.SPECULATION)
    for _ in range(2):
        pool.policy.follow(Decision("eagle3", "x", "y"), request(), [eagle3])
    for decision in sent:
        pool.policy.observe(answer(request(), decision, Method.EAGLE3))
    assert pool.policy.known.replicas["eagle3"].sent == 2


def test_a_client_with_more_than_its_share_in_flight_is_kept_from_the_others() -> None:
    pool = taught()
    pool.backends[-1].in_flight = 6
    usual, greedy = pool.costs(request("chat")), pool.costs(request("chat", overuse=4.0))
    assert greedy["eagle3"] > usual["eagle3"]
    assert greedy["suffix"] == pytest.approx(usual["suffix"])


def test_a_cached_prompt_is_computed_once() -> None:
    pool = taught()
    asked = request("chat", prompt_tokens=20_000, prefix=(1, 2), prefix_tokens=(8000, 20_000))
    before = pool.costs(asked)
    pool.send("baseline", asked, prompt_tokens=20_000)
    after = pool.costs(asked)
    assert after["baseline"] < 0.8 * before["baseline"]
    assert "20,000 tokens of the prompt cached" in pool.policy.assess(asked, pool.backends)[0].note
    pool.policy.sent_elsewhere("suffix", asked.prefix, asked.prefix_tokens)
    pool.now_s += 60.0
    assert pool.costs(asked)["suffix"] < 0.8 * before["suffix"]
    pool.policy.engine_changed("baseline", EngineChange.RESTART)
    assert pool.costs(asked)["baseline"] > 0.8 * before["baseline"]


def test_the_speed_of_each_replica_is_learned() -> None:
    pool = taught()
    before = pool.costs(request("chat"))
    for _ in range(60):
        pool.send("baseline", request("chat"), per_step=1.0, step_s=2 * STEP_S)
        pool.fit()
    after = pool.costs(request("chat"))
    assert 1.5 < after["baseline"] / before["baseline"] < 2.5
    assert after["suffix"] == pytest.approx(before["suffix"], rel=0.35)


def test_a_restart_ends_what_is_known_of_the_speed_of_a_slow_replica_only() -> None:
    """A slow one gets no requests, which alone could show that its new engine is not."""
    pool, asked = taught(), [request("chat"), request("chat", prompt_tokens=20_000)]

    def costs() -> list[dict[str, float]]:
        pool.fit()
        return [pool.costs(each) for each in asked]

    before = costs()
    for _ in range(60):
        pool.send("baseline", asked[0], per_step=1.0, step_s=10 * STEP_S)
        pool.send("baseline", asked[1], prompt_tokens=20_000, ttft_s=10.0, per_step=1.0, step_s=10 * STEP_S)
        pool.send("suffix", asked[0], step_s=STEP_S / 2)
    learned = costs()
    statistics = pool.policy.statistics
    for row in [*statistics.own()]:  # a process that has ended learned the same, and drops nothing
        statistics.set_others_of(row.table, row.epoch, {each.key: each.sums for each in statistics.own_of(*row[:2])})
    for name in ("baseline", "suffix"):
        pool.policy.engine_changed(name, EngineChange.RESTART)
    after = costs()
    for each in range(2):
        assert learned[each]["baseline"] > 5 * before[each]["baseline"]
        assert after[each]["baseline"] < 1.5 * before[each]["baseline"]
        assert after[each]["suffix"] == pytest.approx(learned[each]["suffix"], rel=0.1)


def test_new_weights_end_what_ended_processes_know_of_a_replica_too() -> None:
    pool = Pool()
    pool.backends.append(Backend("other", "m", Method.EAGLE3, "http://b", 3))
    for name in ("eagle3", "other"):
        pool.send(name, request("chat"))
    statistics, own = pool.policy.statistics, pool.policy.known.replicas["other"].own
    for row in [*statistics.own()]:
        statistics.set_others_of(row.table, row.epoch, {each.key: each.sums for each in statistics.own_of(*row[:2])})
    assert {own, "other"} <= {key[0] for table in (PER_STEP, STEPS) for key in statistics.buckets(table)}
    pool.policy.engine_changed("other", EngineChange.RELOAD)
    assert not {own, "other"} & {key[0] for table in (PER_STEP, STEPS) for key in statistics.buckets(table)}


@pytest.mark.parametrize(("factor", "is_slow"), [(1.05, False), (1.5, True)])
def test_the_slower_of_two_replicas_is_slow_if_it_clearly_is(factor: float, is_slow: bool) -> None:
    pool = Pool()
    for _ in range(60):
        pool.send("baseline", request("chat"), step_s=factor * STEP_S)
    assert not pool.policy.known.is_slow("baseline"), "there is no other"
    for _ in range(60):
        pool.send("ngram", request("chat"), per_step=1.0)
    assert pool.policy.known.is_slow("baseline") is is_slow
    assert not pool.policy.known.is_slow("ngram")


def test_the_speed_of_a_replica_is_learned_from_answers_in_one_piece() -> None:
    pool = taught()
    before = pool.costs(request("chat"))["baseline"]
    for _ in range(60):
        pool.send("baseline", request("chat"), step_s=2 * STEP_S, ttft_s=None, tpot_s=None)
        pool.fit()
    known = pool.costs(request("chat"))["baseline"]
    assert known / before > 1.4
    assert not pool.policy.detector.found
    for _ in range(60):  # another replica had failed these
        decision = pool.policy.follow(Decision("baseline", "x", "y"), request("chat"), pool.backends[:1])
        pool.now_s += 150 * 2 * STEP_S
        pool.policy.observe(answer(request("chat"), decision, Method.BASELINE, e2e_s=30.0, ttft_s=None, tpot_s=None))
        pool.fit()
    assert pool.costs(request("chat"))["baseline"] == pytest.approx(known, rel=0.2)


def test_fast_answers_in_one_piece_teach_as_slow_ones_do() -> None:
    pool, asked = taught(), request("chat", prompt_tokens=10_000)
    (delay,) = pool.policy._delays(asked, pool.backends[:1])
    assert 0.2 < delay.ttft_s / (150 * STEP_S) < 0.25
    for factor in (0.6, 1.4):
        pool, e2e_s = taught(), delay.ttft_s + factor * 149 * STEP_S
        before = pool.policy.statistics.buckets(STEPS)["baseline",][0]
        for _ in range(20):
            pool.send("baseline", asked, ttft_s=None, tpot_s=None, e2e_s=e2e_s, prompt_tokens=10_000)
        assert pool.policy.statistics.buckets(STEPS)["baseline",][0] == pytest.approx(before + 20, rel=0.05)


def test_the_counters_of_an_engine_teach_what_its_answers_do_not_show() -> None:
    pool, unseen = Pool(), {"ttft_s": None, "tpot_s": None, "tokens_per_step": None}
    eagle3 = pool.backends[-1]
    for number in range(1, 41):
        eagle3.load = EngineLoad(drafts=100 * number, accepted_tokens=10 * number, at_s=math.inf)
        pool.send("eagle3", request("chat"), **unseen)
    eagle3.load = EngineLoad(drafts=60, accepted_tokens=180, at_s=math.inf)  # restarted
    pool.send("eagle3", request("chat"), **unseen)
    for kind in ("chat", "code"):
        (delay,) = pool.policy._delays(request(kind), [eagle3])
        assert 1.0 < delay.per_step < 1.5


def test_counters_teach_nothing_while_other_answers_show_what_they_count() -> None:
    pool, unseen = Pool(), {"ttft_s": None, "tpot_s": None, "tokens_per_step": None}
    eagle3, drafts, accepted = pool.backends[-1], 0, 0.0
    asked = request("code"), request("chat", temperature=1.0)
    shown, hidden = (pool.policy._delays(each, [eagle3])[0].per_step for each in asked)
    assert shown > 1.3 * hidden
    for _ in range(100):
        drafts, accepted = drafts + 200, accepted + 100 * (shown + hidden - 2.0)
        eagle3.load = EngineLoad(drafts=drafts, accepted_tokens=int(accepted), at_s=math.inf)
        pool.send("eagle3", asked[0], per_step=shown)
        pool.send("eagle3", asked[1], **unseen)
    assert pool.policy._delays(asked[1], [eagle3])[0].per_step == pytest.approx(hidden, rel=0.03)


def test_steps_that_prompts_of_other_gateways_lengthen_are_no_fault_of_a_replica() -> None:
    pool = taught()
    asked, backend = request("chat"), pool.backends[0]
    for number in range(60):
        decision = pool.policy.follow(Decision("baseline", "x", "y"), asked, [backend])
        pool.policy.sent_elsewhere("baseline", (number,), (40_000,))
        prompt_s = pool.policy.known.replicas["baseline"].prefill_left_s(pool.now_s)
        outcome = answer(asked, decision, backend.method, step_s=STEP_S + prompt_s / 149)
        pool.now_s += outcome.e2e_s
        pool.policy.observe(outcome)
    assert outcome.e2e_s > 2 * 150 * STEP_S
    assert not pool.policy.detector.found


def test_a_client_moves_no_more_by_replays_that_come_later() -> None:
    pool = Pool()
    for number in range(200):
        asked = request(client="many" if number % 10 else f"few {number // 10 % 4}")
        decision = pool.policy.follow(Decision("baseline", "x", "y"), asked, pool.backends[:1])
        outcome = answer(asked, decision, Method.BASELINE)
        pool.policy.observe(outcome)
        pool.policy.observe_shadow(replace(outcome, shadow={"suffix:24": 3.0}))
    known = pool.policy.known
    assert known.per_step.count("suffix:24", ()) == pytest.approx(known.lengths.count("", ()), rel=0.01)


def test_replays_are_corrected_by_what_the_engine_shows() -> None:
    pool = Pool()
    for _ in range(60):
        pool.send("suffix", request("code"), per_step=3.0, shadow={"suffix:24": 2.0})
    for _ in range(60):
        pool.send("baseline", request("chat"), per_step=1.0, shadow={"suffix:24": 2.0})
    per_step = {one.replica.name: one.per_step for one in pool.policy._delays(request("chat"), pool.backends)}
    assert 2.6 < per_step["suffix"] < 3.2


def test_a_silent_drafter_counts_as_none_until_it_drafts_again() -> None:
    pool = taught()
    for _ in range(12):
        pool.send("eagle3", request("chat"), per_step=1.0)
    note = pool.policy.assess(request("chat"), pool.backends)[-1].note
    assert "silent" in note
    assert ", 1.00 per step" in note
    assert "eagle3" in pool.policy.detector.silent
    for _ in range(10):
        pool.send("eagle3", request("chat"), per_step=2.6)
    assert pool.policy.choose(request("chat"), pool.backends).backend == "eagle3"


def test_long_answers_that_repeat_themselves_do_not_make_a_method_look_good() -> None:
    pool = taught()
    before = pool.costs(request("chat"))["suffix"]
    for _ in range(20):
        pool.send("suffix", request("chat"), per_step=20.0, output_tokens=8000, tpot_s=0.001)
    after = {one.replica.name: one.per_step for one in pool.policy._delays(request("chat"), pool.backends)}
    assert after["suffix"] < 1.5
    assert before > 0.0


def test_what_one_policy_knows_the_next_one_takes_over() -> None:
    pool = taught()
    follower = Learned(LearnedSettings(objective="goodput", slo={"tpot_ms": 10}))
    follower.take_over(pool.policy)
    assert follower.choose(request("code"), pool.backends).backend == "suffix"
    other = Learned(LearnedSettings(calibration="llama-3.1-70b-4xh100"))
    other.take_over(pool.policy)
    assert other.known.replicas == {}
    assert other.statistics is pool.policy.statistics


def test_statistics_of_another_run_are_read() -> None:
    pool, fresh = taught(), Pool()
    for table in pool.policy.statistics.tables.values():
        epoch = int(pool.now_s // table.epoch_s)
        rows = pool.policy.statistics.own_of(table.name, epoch)
        fresh.policy.statistics.set_others_of(table.name, epoch, {row.key: row.sums for row in rows})
    fresh.now_s = pool.now_s
    fresh.fit()
    before, after = pool.costs(request("code")), fresh.costs(request("code"))
    assert min(after, key=after.__getitem__) == "suffix"
    assert after["suffix"] == pytest.approx(before["suffix"], rel=0.1)


def test_decisions_tell_their_prediction_and_score_all_candidates_if_asked() -> None:
    pool = taught()
    decision = pool.policy.choose(request("code"), pool.backends)
    assert 0.0 < (predicted_s(decision) or 0.0) < 10.0
    assert not decision.candidates
    pool.policy.explain_candidates = True
    decision = pool.policy.choose(request("code"), pool.backends)
    assert decision.candidates == pool.backends
    assert min(decision.costs) == decision.costs[2]
    price = pool.policy.price(request("code"), pool.backends)
    assert 0.0 < price.expected_s() < 10.0


def test_the_table_can_be_read_as_rules() -> None:
    pool = taught()
    rules = rules_of(pool.policy.known, pool.backends)
    policy = Thresholds(rules.settings.model_copy(update={"seed": 1}))
    assert policy.choose(request("code"), pool.backends).backend == "suffix"
    assert policy.choose(request("chat"), pool.backends).backend == "eagle3"
    assert rules.settings.rules[-1].when.conditions() == {}
    assert len(rules.settings.rules) > 1
    shares = re.findall(r"# (\d+)% of the requests", rules.text)
    assert sum(map(int, shares)) == pytest.approx(100, abs=len(shares))
    shown = in_words(pool.policy.known, pool.backends)
    assert any(line.startswith("code, temperature below 0.05") and ": suffix," in line for line in shown)


@pytest.mark.parametrize("kind", [("0/0", "chat"), ("9/0", "3//chat"), ("0/0", "3//a: b")])
def test_no_rule_is_made_of_a_kind_that_another_gateway_made_up(kind: tuple[str, str]) -> None:
    pool = taught()
    before = rules_of(pool.policy.known, pool.backends)
    sums: dict[tuple[str, ...], tuple[float, ...]] = {("eagle3:3", *kind, "", ""): (1e4, 1e4, 1e4, 1e4)}
    pool.policy.statistics.set_others_of(PER_STEP.name, int(pool.now_s // PER_STEP.epoch_s), sums)
    pool.fit()
    assert rules_of(pool.policy.known, pool.backends).settings.rules[-1].when == before.settings.rules[-1].when
    assert len(in_words(pool.policy.known, pool.backends)) == len(in_words(taught().policy.known, pool.backends))


@pytest.mark.slow
def test_the_rules_are_few_of_however_many_kinds() -> None:
    pool, rng = Pool(), Random(1)
    for number in range(45):
        bins = {"temperature": rng.choice([0.0, 0.3, 0.7, 1.0]), "overlap": rng.choice([0.0, 0.2, 0.5])}
        asked = request(f"w{number % 5}", prompt_tokens=rng.choice([50, 200, 800, 5000]), **bins)
        pool.teach(asked, 2, suffix=rng.uniform(1.0, 4.0), ngram=rng.uniform(1.0, 3.0), eagle3=rng.uniform(1.0, 3.0))
    assert len(kinds_of(pool.policy.known, pool.backends)) > 35
    assert len(rules_of(pool.policy.known, pool.backends).settings.rules) <= 2 * MOST_RULES + 1


def test_a_kind_that_no_rule_was_made_of_counts_as_one_of_the_last_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "_MOST_KINDS", 1)
    pool = taught()
    pool.teach(request("code", temperature=1.0, overlap=0.9, prompt_tokens=20_000), 1, suffix=2.0)
    shares = re.findall(r"# (\d+)% of the requests", rules_of(pool.policy.known, pool.backends).text)
    assert sum(map(int, shares)) == pytest.approx(100, abs=len(shares))


@pytest.mark.parametrize("workload", ["default", "spilled", "1", "no"])
def test_rules_can_be_made_and_read_whatever_clients_call_their_workloads(workload: str) -> None:
    pool = Pool()
    pool.teach(request(workload), suffix=3.0)
    rules = rules_of(pool.policy.known, pool.backends)
    document = yaml.safe_load(rules.text)
    assert ThresholdSettings.model_validate({"rules": document["rules"]}) == rules.settings
    assert rules.settings.rules[0].when.workload == frozenset([workload])


def test_thresholds_are_the_loads_at_which_costs_cross() -> None:
    pool = taught()
    for kind in kinds_of(pool.policy.known, pool.backends):
        (first, at_first, _), *rest = kind.thresholds()
        assert at_first == 0.0
        for target, requests, _ in rest:
            assert kind.lines[first].at(requests) == pytest.approx(kind.lines[target].idle_s)


def test_nothing_learned_gives_no_rules() -> None:
    pool = Pool()
    with pytest.raises(NothingLearnedError):
        rules_of(pool.policy.known, pool.backends)
    with pytest.raises(NothingLearnedError):
        rules_of(pool.policy.known, pool.backends[:1])


@pytest.mark.parametrize("bound", [math.inf, math.nan])
def test_an_objective_is_a_finite_number(bound: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        LearnedSettings(objective="goodput", slo={"ttft_ms": bound})


def test_what_an_objective_weighs() -> None:
    pool, asked = taught(), replace(request("chat"), slo_tpot_s=0.005)
    latency = pool.costs(asked)
    goodput = Learned(LearnedSettings(objective="goodput", guardrail={"share": 0}))
    goodput.take_over(pool.policy)
    weighed = {each.backend: each.score or 0.0 for each in goodput.assess(asked, pool.backends)}
    assert all(weighed[name] > latency[name] for name in latency)
    assert weighed["baseline"] / latency["baseline"] > weighed["eagle3"] / latency["eagle3"]
