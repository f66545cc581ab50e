"""Step costs are recovered from the outcomes of requests on simulated engines of other machines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.calibration.parameters import EngineParameters
from backends.speculation import Method
from policies.balancing.least_loaded import LeastLoaded
from policies.learned.models.keys import Key
from policies.learned.models.prior import StepCost
from policies.learned.models.step_time import (
    STEPS,
    fit_levels,
    fit_scale,
    fit_steps,
    observation,
    of_backends,
    seconds,
    terms,
)
from policies.learned.policy import Learned, LearnedSettings
from policies.load_policy import LoadSettings
from policies.roles import Stateful
from policies.statistics import Statistics, Sums
from tests.support.simulated import calls, fit, play, replicas
from tests.support.step_time import step_s

PRIOR = StepCost(0.008, 1e-4, 2e-7, 3e-5)
TWO = (("b", Method.BASELINE, 0), ("e", Method.EAGLE3, 3))
TOLERANCE = 0.12
"""Relative tolerance of a recovered step time; the spread of the prior is 0.5."""


def _true_s(parameters: EngineParameters, requests: int, context_tokens: int) -> float:
    """Return the seconds of a step in which all requests decode."""
    k = parameters.k
    return step_s(parameters, requests * (1 + k), context_tokens, k, requests, drafted=k > 0)


@pytest.mark.parametrize("calibration", ["llama-3.1-70b-4xh100", "llama-3.1-8b-l40s", "qwen3-8b-h100"])
def test_costs_are_recovered_on_other_machines_than_the_prior(calibration: str) -> None:
    policy = Learned(LearnedSettings(seed=1))
    pool = replicas(calibration, *TWO)
    later = [replace(call, arrived_s=call.arrived_s + 70.0) for call in calls(400, 25.0, 2)]
    play(policy, pool, calls(200, 4.0, 1) + later)
    fit(policy)
    priors = {name: model.prior for name, model in policy.predictor.backend_models.items()}
    fitted = policy.fitted(priors).steps
    for replica in pool:
        for requests in (1, 8, 24):
            true_s = _true_s(replica.parameters, requests, 700 * requests)
            fitted_s = seconds(fitted[replica.name], terms(requests, 700.0 * requests, 0.0))
            assert fitted_s == pytest.approx(true_s, rel=TOLERANCE)


def _observe(true: StepCost, loads: np.ndarray, rng: np.random.Generator) -> tuple[float, ...]:
    sums = np.zeros(STEPS.width)
    for row in loads:
        load = terms(*row)
        step_s = seconds(true, load) * float(np.exp(rng.normal(0, 0.1)))
        sums += observation(step_s, load, PRIOR, seconds(PRIOR, load))
    return tuple(float(each) for each in sums)


def _buckets(true: StepCost, count: int, rng: np.random.Generator) -> dict[Key, Sums]:
    return {("a",): _observe(true, _loads(rng, count), rng)}


def _loads(rng: np.random.Generator, count: int) -> np.ndarray:
    requests = rng.integers(1, 40, count)
    return np.column_stack([requests, requests * rng.uniform(200, 2000, count), rng.uniform(0, 400, count)])


def test_synthetic_costs_are_recovered_term_by_term() -> None:
    true = StepCost(0.010, 2e-4, 4e-7, 2e-5)
    rng = np.random.default_rng(2)
    fitted = fit_steps({("a",): _observe(true, _loads(rng, 3000), rng)}, {"a": PRIOR})["a"]
    assert fitted == pytest.approx(true, rel=0.25)
    for load in (terms(1, 500, 0), terms(30, 30_000, 200)):
        assert seconds(fitted, load) == pytest.approx(seconds(true, load), rel=0.04)


def test_the_fit_is_the_prior_without_observations_and_near_it_with_few() -> None:
    assert fit_steps({}, {"a": PRIOR}) == {"a": PRIOR}
    rng = np.random.default_rng(3)
    buckets = _buckets(PRIOR.scaled(1.3), 1, rng)
    fitted = fit_steps(buckets, {"a": PRIOR})["a"]
    assert PRIOR.base_s * 0.9 < fitted.base_s < PRIOR.base_s * 1.6


def test_a_new_backend_has_the_scale_of_its_pool() -> None:
    rng = np.random.default_rng(4)
    buckets = _buckets(PRIOR.scaled(3.0), 200, rng)
    assert fit_scale(buckets) == pytest.approx(3.0, rel=0.05)
    assert fit_steps(buckets, {"a": PRIOR, "new": PRIOR})["new"] == pytest.approx(PRIOR.scaled(3.0), rel=0.05)
    assert fit_scale({}) == 1.0


def test_no_cost_is_negative() -> None:
    rng = np.random.default_rng(5)
    flat = StepCost(0.02, 0.0, 0.0, 0.0)
    loads = np.column_stack([np.arange(1, 31), np.arange(30, 0, -1) * 1000.0, np.zeros(30)])
    fitted = fit_steps({("a",): _observe(flat, loads, rng)}, {"a": PRIOR})["a"]
    assert min(fitted) >= 0.0


@pytest.mark.parametrize("stall_s", [0.5, 5.0])
def test_a_stall_has_a_bounded_influence(stall_s: float) -> None:
    """A longer stall counts like one of three times the expected time, here at a load with few observations."""
    rng = np.random.default_rng(6)
    load = terms(4, 4000, 0)
    usual_s = seconds(PRIOR, load)
    sums = np.array(_observe(PRIOR, _loads(rng, 200), rng)) + observation(stall_s, load, PRIOR, usual_s)
    fitted = fit_steps({("a",): tuple(sums)}, {"a": PRIOR})["a"]
    assert seconds(fitted, load) == pytest.approx(usual_s, rel=0.4)


def test_own_and_received_sums_fit_like_all_observations_of_one_gateway() -> None:
    rng = np.random.default_rng(7)
    halves = [_observe(PRIOR.scaled(1.5), _loads(rng, 50), rng) for _ in range(2)]
    shared, single = (Statistics([STEPS], lambda: 5000.0) for _ in range(2))
    shared.add(STEPS, ("a",), *halves[0])
    shared.set_others_of("steps", int(5000.0 // STEPS.epoch_s), {("a",): halves[1]})
    for half in halves:
        single.add(STEPS, ("a",), *half)
    assert fit_steps(shared.buckets(STEPS), {"a": PRIOR})["a"] == pytest.approx(
        fit_steps(single.buckets(STEPS), {"a": PRIOR})["a"]
    )


def test_an_engine_restarted_with_other_settings_is_learned_again() -> None:
    """Four half-lives later, the first observations weigh a sixteenth."""
    rng, now_s = np.random.default_rng(8), 0.0
    statistics = Statistics([STEPS], lambda: now_s)
    statistics.add(STEPS, ("a",), *_observe(PRIOR, _loads(rng, 100), rng))
    now_s = 4 * STEPS.half_life_s
    statistics.add(STEPS, ("a",), *_observe(PRIOR.scaled(2.0), _loads(rng, 100), rng))
    fitted = fit_steps(statistics.buckets(STEPS), {"a": PRIOR})["a"]
    load = terms(8, 8000, 0)
    assert seconds(fitted, load) == pytest.approx(seconds(PRIOR.scaled(2.0), load), rel=0.15)


def test_each_level_is_fitted_towards_the_backend_and_the_backend_to_all_of_them() -> None:
    """Steps at one k take twice as long as the calibration says, at the other 1.2 times."""
    rng = np.random.default_rng(9)
    buckets = {
        ("a", "0"): _observe(PRIOR.scaled(2.0), _loads(rng, 200), rng),
        ("a", "3"): _observe(PRIOR.scaled(1.2), _loads(rng, 200), rng),
        ("a",): _observe(PRIOR.scaled(1.6), _loads(rng, 50), rng),
    }
    costs = fit_steps(buckets, {"a": PRIOR})
    levels = fit_levels(buckets, costs)
    load = terms(8, 8000, 0)
    once_s = seconds(PRIOR, load)
    assert seconds(costs["a"], load) == pytest.approx(1.6 * once_s, rel=0.1)
    assert seconds(levels["a", "0"], load) == pytest.approx(2.0 * once_s, rel=0.05)
    assert seconds(levels["a", "3"], load) == pytest.approx(1.2 * once_s, rel=0.05)
    assert set(levels) == {("a", "0"), ("a", "3")}
    assert of_backends(buckets)["a"][0] == 450.0


def test_only_a_learning_policy_has_statistics() -> None:
    assert not isinstance(LeastLoaded(LoadSettings()), Stateful)
    assert isinstance(Learned(LearnedSettings()), Stateful)
