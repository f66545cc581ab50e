"""What `learned` says that it believes, against what it was shown and what it does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.belief import MOST_GROUPS, belief_of, present_step_s
from policies.learned.models.keys import key_of
from policies.learned.policy import Learned, LearnedSettings
from tests.support.simulated import CALIBRATION, calls, fit, play, replicas

PARTS = (("b", Method.BASELINE, 0), ("e", Method.EAGLE3, 3))


def _pool(*parts: tuple[str, Method, int]) -> list[Backend]:
    return [Backend(name, "m", method, "http://127.0.0.1:1", num_speculative_tokens=k) for name, method, k in parts]


def _learned(parts: tuple[tuple[str, Method, int], ...] = PARTS, requests: int = 400) -> Learned:
    policy = Learned(LearnedSettings(seed=1, guardrail={"share": 0.2}))
    play(policy, replicas(CALIBRATION, *parts), calls(requests, 4.0, seed=2))
    fit(policy)
    policy.assess(RequestFeatures("m", Endpoint.CHAT), _pool(*parts))  # takes over the fit
    return policy


def test_speedups_are_those_of_the_fitted_models() -> None:
    policy = _learned()
    belief = belief_of(policy, _pool(*PARTS), 1.0)
    assert belief.baseline == "b"
    groups = {(group.workload, group.template) for group in belief.groups}
    assert {workload for workload, _ in groups} == {"chat", "code"}
    assert all(group.temperature == "0-0.05" for group in belief.groups)
    assert [group.requests for group in belief.groups] == sorted(
        (group.requests for group in belief.groups), reverse=True
    )
    models = policy.predictor.backend_models
    for group in belief.groups:
        plain, eagle = group.backends
        assert (plain.backend, plain.speedup, plain.tokens_per_step) == ("b", pytest.approx(1.0), pytest.approx(1.0))
        request = RequestFeatures(
            "m", Endpoint.CHAT, temperature=0.0, workload=group.workload, template=group.template, prompt_tokens=400
        )
        per_step = policy.predictor.tokens_per_step("e", key_of(request))
        assert eagle.tokens_per_step == pytest.approx(per_step, rel=0.1)
        step_ratio = models["e"].cost.base_s / models["b"].cost.base_s
        assert eagle.speedup == pytest.approx(eagle.tokens_per_step / step_ratio, rel=0.25)
        assert eagle.observed_tokens_per_step is not None
        assert eagle.observed_tokens_per_step == pytest.approx(eagle.tokens_per_step, rel=0.15)


def test_requests_are_those_observed() -> None:
    policy = _learned()
    belief = belief_of(policy, _pool(*PARTS), 1.0)
    # The first request of each template is in a group without one, which is too small to be shown.
    assert sum(group.requests for group in belief.groups) == pytest.approx(400, rel=0.02)
    for group in belief.groups:
        assert sum(backend.requests for backend in group.backends) == pytest.approx(group.requests)


def test_without_a_baseline_the_first_backend_is_what_others_are_compared_with() -> None:
    policy = _learned((("e", Method.EAGLE3, 3), ("s", Method.SUFFIX, 24)))
    belief = belief_of(policy, _pool(("e", Method.EAGLE3, 3), ("s", Method.SUFFIX, 24)), 1.0)
    assert belief.baseline == "e"
    models = policy.predictor.backend_models
    for group in belief.groups:
        first, other = group.backends
        assert first.speedup == pytest.approx(1.0)
        steps = models["e"].cost.base_s / models["s"].cost.base_s
        assert other.speedup == pytest.approx(other.tokens_per_step / first.tokens_per_step * steps, rel=0.1)


def test_rare_templates_are_shown_together_and_their_number_has_a_bound() -> None:
    policy = Learned(LearnedSettings())
    pool = _pool(*PARTS)
    policy.choose(RequestFeatures("m", Endpoint.CHAT), pool)
    acceptance = policy.statistics.tables["acceptance"]
    for number in range(300):
        rare = key_of(RequestFeatures("m", Endpoint.CHAT, workload="chat", template=f"{number:08x}"))
        policy.statistics.add(acceptance, ("eagle3:3", "e", *rare), 1.0, math.log(2.0), math.log(2.0) ** 2)
        known = key_of(RequestFeatures("m", Endpoint.CHAT, workload=f"w{number % 50}", template="ffffffff"))
        for _ in range(20):
            policy.statistics.add(acceptance, ("eagle3:3", "e", *known), 1.0, 0.0, 0.0)
    belief = belief_of(policy, pool, 1.0)
    assert len(belief.groups) == MOST_GROUPS
    assert belief.groups[0].requests >= belief.groups[-1].requests
    together = belief.groups[0]
    assert (together.workload, together.template, together.requests) == ("chat", "", pytest.approx(300))
    assert together.backends[1].observed_tokens_per_step == pytest.approx(2.0)
    assert {group.template for group in belief.groups[1:]} == {"ffffffff"}


def test_where_reading_the_context_takes_most_of_a_step_drafting_costs_little() -> None:
    policy = _learned()
    acceptance, log = policy.statistics.tables["acceptance"], math.log(2.0)
    for workload, tokens in (("long", 30_000), ("short", 20)):
        key = key_of(RequestFeatures("m", Endpoint.CHAT, workload=workload, prompt_tokens=tokens))
        policy.statistics.add(acceptance, ("eagle3:3", "e", *key), 1000.0, 1000.0 * log, 1000.0 * log**2)
    groups = {group.workload: group.backends[1] for group in belief_of(policy, _pool(*PARTS), 40.0).groups}
    gains = {name: groups[name].speedup / groups[name].tokens_per_step for name in ("long", "short")}
    assert gains["short"] < gains["long"] - 0.05 < 1.0


def test_nothing_is_believed_of_what_was_never_observed() -> None:
    assert belief_of(Learned(LearnedSettings()), _pool(*PARTS), 1.0).groups == []


def test_the_present_step_time_grows_with_the_load() -> None:
    policy = _learned()
    model = policy.predictor.backend_models["e"]
    assert model.cost.base_s < present_step_s(model, 1) < present_step_s(model, 64)
    assert present_step_s(model, 0) == present_step_s(model, 1)


def test_a_replica_with_a_schedule_is_shown_at_the_k_of_the_batch() -> None:
    policy, (plain, eagle) = _learned(), _pool(*PARTS)
    config = {"num_speculative_tokens_per_batch_size": [[1, 16, 3], [17, 999, 0]]}
    policy.forget("e")
    pool = [plain, replace(eagle, speculative_config=config)]
    policy.assess(RequestFeatures("m", Endpoint.CHAT), pool)
    few, many = (belief_of(policy, pool, batch).groups[0].backends[1] for batch in (4.0, 60.0))
    assert few.tokens_per_step > 1.5
    assert few.speedup > 1.2
    assert (many.tokens_per_step, many.speedup) == (1.0, pytest.approx(1.0, rel=0.1))
