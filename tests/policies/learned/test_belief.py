"""What `learned` says that it believes, against what it was shown and what it does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from backends.speculation import Method
from policies.learned.belief import MOST_GROUPS, belief_of, present_step_s
from policies.learned.prior import DEFAULT_CALIBRATION, expected_by_k
from policies.learned.table import ANSWERS, PER_STEP, Kinds
from policies.statistics import Table
from tests.policies.learned.pool import Pool, request


def taught() -> Pool:
    pool = Pool()
    pool.teach(request("code"), ngram=3.1, suffix=1.4, eagle3=2.2)
    return pool


def test_speedups_are_those_by_which_it_routes() -> None:
    pool = taught()
    pool.teach(request("chat"), eagle3=2.6)
    belief = belief_of(pool.policy, pool.backends, 1.0)
    assert belief.baseline == "baseline"
    assert {(group.workload, group.temperature) for group in belief.groups} == {("code", "0-0.05"), ("chat", "0-0.05")}
    for group in belief.groups:
        routed = pool.policy._delays(request(group.workload), pool.backends)
        for each, delay in zip(group.backends, routed, strict=True):
            assert each.tokens_per_step == pytest.approx(delay.per_step, rel=0.1)
            assert each.speedup == pytest.approx(delay.per_step * routed[0].step_s / delay.step_s, rel=0.1)


def test_without_a_baseline_the_first_backend_is_what_others_are_compared_with() -> None:
    pool = taught()
    _, ngram, *_, eagle3 = belief_of(pool.policy, pool.backends, 1.0).groups[0].backends
    belief = belief_of(pool.policy, pool.backends[1:], 1.0)
    first, *_, last = belief.groups[0].backends
    assert belief.baseline == first.backend == "ngram"
    assert (first.speedup, last.speedup) == pytest.approx((1.0, eagle3.speedup / ngram.speedup))


def test_what_is_shown_as_observed_is_what_was() -> None:
    pool = taught()
    (group,) = belief_of(pool.policy, pool.backends, 1.0).groups
    for each, usual in zip(group.backends, (1.0, 3.1, 1.4, 2.2), strict=True):
        assert each.observed_tokens_per_step == pytest.approx(usual, rel=0.03)
        assert each.tokens_per_step == pytest.approx(usual, rel=0.08)
        assert each.requests == each.sent == 40.0
    assert group.requests == 160.0


def test_two_replicas_of_a_method_share_what_is_observed_and_not_what_they_answered() -> None:
    pool = Pool()
    twin = replace(pool.backends[-1], name="twin")
    pool.backends.append(twin)
    pool.teach(request("code"), eagle3=2.2, twin=2.2)
    *_, one, other = belief_of(pool.policy, pool.backends, 1.0).groups[0].backends
    assert (one.requests, one.sent) == (other.requests, other.sent) == (80.0, 40.0)


def test_rare_templates_are_shown_together_and_their_number_has_a_bound() -> None:
    pool = Pool()
    pool.policy.assess(request(), pool.backends)
    known = pool.policy.known

    def observe(workload: str, template: str, per_step: float, times: int) -> None:
        asked = request(workload, template=template)
        for _ in range(2):  # it is a template from the second request on
            known.kinds.see(template)
        expected = expected_by_k(
            DEFAULT_CALIBRATION, Method.EAGLE3, 3, workload, asked.temperature, asked.prompt_tokens
        )
        excess = math.log(per_step) - expected[-1]
        known.per_step.add("eagle3:3", known.kinds.of(asked).groups, excess, times, times, pool.now_s)

    for number in range(300):
        observe("chat", f"{number:08x}", 2.0, 1)
        observe(f"w{number % 50}", "ffffffff", 1.0, 20)
    together, *others = belief_of(pool.policy, pool.backends, 1.0).groups
    assert len(others) == MOST_GROUPS - 1
    assert (together.workload, together.template, together.requests) == ("chat", "", pytest.approx(300))
    assert together.backends[-1].observed_tokens_per_step == pytest.approx(2.0, rel=0.05)
    assert {group.template for group in others} == {"ffffffff"}


def test_where_reading_the_context_takes_most_of_a_step_drafting_costs_little() -> None:
    pool = Pool()
    for workload, tokens in (("long", 30_000), ("short", 20)):
        asked = request(workload, prompt_tokens=tokens)
        pool.policy.assess(asked, pool.backends)
        pool.policy.known.per_step.add("eagle3:3", Kinds().of(asked).groups, 0.0, 1000.0, 1000.0, pool.now_s)
    groups = {group.workload: group.backends[-1] for group in belief_of(pool.policy, pool.backends, 40.0).groups}
    gains = {name: groups[name].speedup / groups[name].tokens_per_step for name in ("long", "short")}
    assert gains["short"] < gains["long"] - 0.05 < 1.0


def test_nothing_is_believed_of_what_was_never_observed() -> None:
    pool = Pool()
    assert belief_of(pool.policy, pool.backends, 1.0).groups == []
    pool.policy.assess(request(), pool.backends)
    assert belief_of(pool.policy, pool.backends, 1.0).groups == []


def test_the_present_step_time_grows_with_the_load() -> None:
    replica = taught().policy.known.replicas["eagle3"]
    assert replica.cost(1.0).base_s < present_step_s(replica, 1) < present_step_s(replica, 64)
    assert present_step_s(replica, 0) == present_step_s(replica, 1)


def test_a_replica_with_a_schedule_is_shown_at_the_k_of_the_batch() -> None:
    pool = taught()
    config = {"num_speculative_tokens_per_batch_size": [[1, 16, 3], [17, 999, 0]]}
    pool.backends[-1] = replace(pool.backends[-1], speculative_config=config)
    pool.policy.forget("eagle3")
    pool.policy.assess(request(), pool.backends)
    few, many = (belief_of(pool.policy, pool.backends, batch).groups[0].backends[-1] for batch in (4.0, 60.0))
    assert few.tokens_per_step > 1.5
    assert few.speedup > 1.2
    assert many.tokens_per_step == 1.0
    assert 0.7 < many.speedup < 0.9, "with k = 0 the head still runs: that is no baseline"


@pytest.mark.parametrize(
    ("table", "key", "sums"),
    [
        (PER_STEP, ("eagle3:3", "9/0", "3//chat", "", ""), (1e4, 2e5, 1e4, 2e5)),
        (ANSWERS, ("eagle3", "0/0", "code/2"), (1e4, 1e4)),
        (ANSWERS, ("eagle3", "0/0", "code/99", ""), (1e4, 1e4)),
        (ANSWERS, ("eagle3", "0/0", "code/2", ""), (-1e4, -1e4)),
    ],
)
def test_sums_of_others_that_cannot_be_do_little_to_beliefs(
    table: Table, key: tuple[str, ...], sums: tuple[float, ...]
) -> None:
    pool = taught()
    (before,) = belief_of(pool.policy, pool.backends, 1.0).groups
    pool.policy.statistics.set_others_of(table.name, int(pool.now_s // table.epoch_s), {key: sums})
    pool.fit()
    (after,) = belief_of(pool.policy, pool.backends, 1.0).groups
    for now, then in zip(after.backends, before.backends, strict=True):
        assert 0.5 < now.speedup / then.speedup < 2.0
        assert 0.0 <= now.sent <= then.sent
