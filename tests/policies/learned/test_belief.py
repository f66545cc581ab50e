"""What `learned` says that it believes, against what it was shown and what it does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from backends.backend import Backend
from backends.speculation import Method
from benchmarks.virtual_time import fit
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.belief import MOST_GROUPS, belief_of, present_step_s
from policies.learned.cost import Delay
from policies.learned.policy import Learned
from policies.learned.prior import expected_by_k
from policies.learned.replica import STEPS
from policies.learned.settings import LearnedSettings
from policies.learned.table import ANSWERS, PER_STEP, Kinds
from policies.statistics import Table
from tests.policies.learned.pool import Pool, request
from tests.support.simulated import CALIBRATION, calls, play, replicas

PARTS = (("b", Method.BASELINE, 0), ("e", Method.EAGLE3, 3))


def _pool(*parts: tuple[str, Method, int]) -> list[Backend]:
    return [Backend(name, "m", method, "http://127.0.0.1:1", num_speculative_tokens=k) for name, method, k in parts]


def _learned(parts: tuple[tuple[str, Method, int], ...] = PARTS, requests: int = 400) -> Learned:
    policy = Learned(LearnedSettings(seed=1, guardrail={"share": 0.2}))
    play(policy, replicas(CALIBRATION, *parts), calls(requests, 4.0, seed=2))
    fit(policy)
    return policy


def _delays(policy: Learned, asked: RequestFeatures, pool: list[Backend]) -> list[Delay]:
    return policy.known.delays(asked, pool, policy.known.kinds.of(asked), policy.clock(), math.inf)


def _observed(policy: Learned, asked: RequestFeatures, per_step: float, times: int = 1) -> None:
    """Have the policy know of answers of an eagle3 replica, with a template from the first one on."""
    known = policy.known
    for _ in range(2):
        known.kinds.see(asked.template)
    expected = expected_by_k(CALIBRATION, Method.EAGLE3, 3, asked.workload, asked.temperature, asked.prompt_tokens)
    excess = math.log(per_step) - expected[-1]
    known.per_step.add("eagle3:3", known.kinds.of(asked).groups, excess, times, times, policy.clock())


@pytest.mark.slow
def test_speedups_are_those_by_which_it_routes() -> None:
    policy = _learned()
    belief = belief_of(policy, _pool(*PARTS), 1.0)
    assert belief.baseline == "b"
    groups = {(group.workload, group.template) for group in belief.groups}
    assert {workload for workload, _ in groups} == {"chat", "code"}
    assert all(group.temperature == "0-0.05" for group in belief.groups)
    assert [group.requests for group in belief.groups] == sorted(
        (group.requests for group in belief.groups), reverse=True
    )
    for group in belief.groups:
        plain, eagle = group.backends
        assert plain.backend == "b"
        assert [plain.speedup, plain.tokens_per_step] == pytest.approx([1.0, 1.0])
        asked = RequestFeatures(
            "m", Endpoint.CHAT, temperature=0.0, workload=group.workload, template=group.template, prompt_tokens=400
        )
        routed = dict(zip("be", _delays(policy, asked, _pool(*PARTS)), strict=True))
        assert eagle.tokens_per_step == pytest.approx(routed["e"].per_step, rel=0.1)
        step_ratio = routed["e"].step_s / routed["b"].step_s
        assert eagle.speedup == pytest.approx(eagle.tokens_per_step / step_ratio, rel=0.1)
        assert eagle.observed_tokens_per_step is not None
        assert eagle.observed_tokens_per_step == pytest.approx(eagle.tokens_per_step, rel=0.15)


def test_what_is_shown_as_observed_is_what_was() -> None:
    pool = Pool()
    pool.teach(request("code"), ngram=3.1, suffix=1.4, eagle3=2.2)
    (group,) = belief_of(pool.policy, pool.backends, 1.0).groups
    for each, usual in zip(group.backends, (1.0, 3.1, 1.4, 2.2), strict=True):
        assert each.observed_tokens_per_step == pytest.approx(usual, rel=0.03)
        assert each.tokens_per_step == pytest.approx(usual, rel=0.08)
        assert each.requests == each.sent == 40.0
    assert group.requests == 160.0


@pytest.mark.slow
def test_requests_are_those_observed_and_sent_those_that_a_replica_answered() -> None:
    policy = _learned()
    belief = belief_of(policy, _pool(*PARTS), 1.0)
    # The first two requests of each of 8 templates are in groups without one, which are too small to be shown.
    assert sum(group.requests for group in belief.groups) == pytest.approx(400 - 2 * 8)
    for group in belief.groups:
        assert sum(backend.requests for backend in group.backends) == pytest.approx(group.requests)
        assert [backend.sent for backend in group.backends] == [backend.requests for backend in group.backends]


def test_two_replicas_of_a_method_share_what_is_observed_and_not_what_they_answered() -> None:
    pool = Pool()
    twin = replace(pool.backends[-1], name="twin")
    pool.backends.append(twin)
    pool.teach(request("code"), eagle3=2.2, twin=2.2)
    *_, one, other = belief_of(pool.policy, pool.backends, 1.0).groups[0].backends
    assert (one.requests, one.sent) == (other.requests, other.sent) == (80.0, 40.0)


def test_shadow_drafts_are_observed_and_sent_nowhere() -> None:
    pool = Pool()
    pool.teach(request("code"), ngram=3.1)
    before = belief_of(pool.policy, pool.backends, 1.0).groups[0]
    for _ in range(50):
        pool.send("baseline", request("code"), shadow={"ngram:5": 3.1})
    after = belief_of(pool.policy, pool.backends, 1.0).groups[0]
    of_ngram = {each.backend: each for each in after.backends}["ngram"]
    assert (of_ngram.requests, of_ngram.sent) == (90.0, 40.0)
    assert after.backends[0].sent == before.backends[0].sent + 50.0


@pytest.mark.slow
def test_without_a_baseline_the_first_backend_is_what_others_are_compared_with() -> None:
    parts = ("e", Method.EAGLE3, 3), ("s", Method.SUFFIX, 24)
    policy = _learned(parts)
    belief = belief_of(policy, _pool(*parts), 1.0)
    assert belief.baseline == "e"
    one, two = (policy.known.replicas[name].cost(1.0) for name in "es")
    for group in belief.groups:
        first, other = group.backends
        assert first.speedup == pytest.approx(1.0)
        steps = one.base_s / two.base_s
        assert other.speedup == pytest.approx(other.tokens_per_step / first.tokens_per_step * steps, rel=0.1)


def test_rare_templates_are_shown_together_and_their_number_has_a_bound() -> None:
    policy, pool = Learned(LearnedSettings(guardrail={"share": 0})), _pool(*PARTS)
    policy.choose(RequestFeatures("m", Endpoint.CHAT), pool)
    for number in range(300):
        _observed(policy, request("chat", template=f"{number:08x}"), 2.0)
        _observed(policy, request(f"w{number % 50}", template="ffffffff"), 1.0, times=20)
    belief = belief_of(policy, pool, 1.0)
    assert len(belief.groups) == MOST_GROUPS
    assert belief.groups[0].requests >= belief.groups[-1].requests
    together = belief.groups[0]
    assert (together.workload, together.template) == ("chat", "")
    assert together.requests == pytest.approx(300)
    assert together.backends[1].observed_tokens_per_step == pytest.approx(2.0, rel=0.05)
    assert {group.template for group in belief.groups[1:]} == {"ffffffff"}


@pytest.mark.slow
def test_where_reading_the_context_takes_most_of_a_step_drafting_costs_little() -> None:
    policy, pool = _learned(), _pool(*PARTS)
    for workload, tokens in (("long", 30_000), ("short", 20)):
        asked = request(workload, prompt_tokens=tokens)
        policy.known.per_step.add("eagle3:3", Kinds().of(asked).groups, 0.0, 1000.0, 1000.0, policy.clock())
    groups = {group.workload: group.backends[1] for group in belief_of(policy, pool, 40.0).groups}
    gains = {name: groups[name].speedup / groups[name].tokens_per_step for name in ("long", "short")}
    assert gains["short"] < gains["long"] - 0.05 < 1.0


def test_nothing_is_believed_of_what_was_never_observed() -> None:
    assert belief_of(Learned(LearnedSettings()), _pool(*PARTS), 1.0).groups == []
    policy = Learned(LearnedSettings())
    policy.assess(request(), _pool(*PARTS))
    assert belief_of(policy, _pool(*PARTS), 1.0).groups == []


@pytest.mark.slow
def test_the_present_step_time_grows_with_the_load() -> None:
    replica = _learned().known.replicas["e"]
    assert replica.cost(1.0).base_s < present_step_s(replica, 1) < present_step_s(replica, 64)
    assert present_step_s(replica, 0) == present_step_s(replica, 1)


@pytest.mark.slow
def test_a_replica_with_a_schedule_is_shown_at_the_k_of_the_batch() -> None:
    policy, (plain, eagle) = _learned(), _pool(*PARTS)
    config = {"num_speculative_tokens_per_batch_size": [[1, 16, 3], [17, 999, 0]]}
    policy.forget("e")
    pool = [plain, replace(eagle, speculative_config=config)]
    policy.assess(request(), pool)
    few, many = (belief_of(policy, pool, batch).groups[0].backends[1] for batch in (4.0, 60.0))
    assert few.tokens_per_step > 1.5
    assert few.speedup > 1.2
    assert many.tokens_per_step == 1.0
    assert 0.7 < many.speedup < 0.9, "with k = 0 the head still runs: that is no baseline"


@pytest.mark.parametrize(
    ("table", "key", "sums"),
    [
        (PER_STEP, ("eagle3:3", "0/0", "chat", "", ""), (1e4, 2e5, 1e4, 2e5)),
        (PER_STEP, ("eagle3:3", "9/0", "3//chat", "", ""), (1e4, 2e5, 1e4, 2e5)),
        (PER_STEP, ("magic:x", "0/0", "code/2", "", ""), (1e4, 2e5, 1e4, 2e5)),
        (ANSWERS, ("eagle3", "0/0", "code/2"), (1e4, 1e4)),
        (ANSWERS, ("eagle3", "0/0", "code/99", ""), (1e4, 1e4)),
        (ANSWERS, ("eagle3", "0/0", "code/2", ""), (-1e4, -1e4)),
        (STEPS, ("eagle3",), (1e4, -2e5, *[1e-9] * 18)),
    ],
)
def test_sums_of_others_that_cannot_be_do_little_to_beliefs(
    table: Table, key: tuple[str, ...], sums: tuple[float, ...]
) -> None:
    pool = Pool()
    pool.teach(request("code"), ngram=3.1, eagle3=2.0)
    (before,) = belief_of(pool.policy, pool.backends, 1.0).groups
    pool.policy.statistics.set_others_of(table.name, int(pool.now_s // table.epoch_s), {key: sums})
    pool.fit()
    (after,) = belief_of(pool.policy, pool.backends, 1.0).groups
    for now, then in zip(after.backends, before.backends, strict=True):
        assert 0.5 < now.speedup / then.speedup < 2.0
        assert 0.0 <= now.sent <= then.sent
