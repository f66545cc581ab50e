"""`learned` on replicas whose k depends on the batch, in a closed loop with the simulator."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

import pytest

from backends.calibration.calibration import load_calibration
from backends.simulator.engine.replica import Replica
from backends.speculation import Method
from policies.learned.models import step_time
from policies.learned.models.keys import key_of
from policies.learned.policy import Learned, LearnedSettings
from tests.support.simulated import calls, fit, play
from tests.support.step_time import step_s

CONFIG = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 24, 1], [25, 999, 0]]}
ELSEWHERE = "llama-3.1-70b-4xh100"
"""Steps there take twice as long as `learned` expects, and a draft a fifth of one instead of a tenth."""


@pytest.fixture(scope="module")
def policy() -> Learned:
    """A policy that saw loads on both sides of the bounds, mostly beyond them."""
    learned = Learned(LearnedSettings(seed=1, guardrail={"share": 0}))  # type: ignore[arg-type]
    replica = Replica("e", load_calibration(ELSEWHERE), Method.EAGLE3, CONFIG)
    slow = calls(60, 0.6, 1)
    busy = [replace(call, arrived_s=call.arrived_s + 150.0) for call in calls(700, 12.0, 2)]
    play(learned, [replica], slow + busy)
    fit(learned)
    learned._publish_fit()
    return learned


def test_steps_without_drafts_do_not_look_like_a_silent_drafter(policy: Learned) -> None:
    assert policy.drafters.silent == {}
    assert policy.outlier_ejection.reasons == {}


@pytest.mark.parametrize(("requests", "k"), [(2, 3), (16, 1), (60, 0)])
def test_step_times_are_learned_at_every_k(policy: Learned, requests: int, k: int) -> None:
    model = policy.predictor.backend_models["e"]
    parameters = Replica("e", load_calibration(ELSEWHERE), Method.EAGLE3, CONFIG).parameters
    true_s = step_s(parameters, requests * (1 + k), 700 * requests, k, requests, drafted=k > 0)
    assert model.depth is not None
    cost = model.cost_at(model.depth.place_of_k(k))
    assert step_time.seconds(cost, step_time.terms(requests, 700.0 * requests, 0.0)) == pytest.approx(true_s, rel=0.17)


def test_tokens_per_step_at_the_maximum_k_are_those_of_a_replica_that_always_has_it(policy: Learned) -> None:
    always = Learned(LearnedSettings(seed=1, guardrail={"share": 0}))  # type: ignore[arg-type]
    replica = Replica("e", load_calibration(ELSEWHERE), Method.EAGLE3, {"num_speculative_tokens": 3})
    requests = calls(400, 4.0, 3)
    play(always, [replica], requests)
    fit(always)
    always._publish_fit()
    keys = [key_of(call.features) for call in requests[:40]]
    ratios = [policy.predictor.tokens_per_step("e", key) / always.predictor.tokens_per_step("e", key) for key in keys]
    assert geometric_mean(ratios) == pytest.approx(1.0, abs=0.06)
