"""The fluid model of a pool: its times, its traffic, and the situations that it logs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from policies.balancing.least_loaded import LeastLoaded
from policies.distill.fluid import FluidBackend, Job, Kind, fluid_pool, play
from policies.distill.fluid_choice import FluidChoice, SituationLog
from policies.distill.traffic import LikelyTraffic, representative
from policies.learned.cost import cost_of
from policies.learned.models.backend_model import FittedModels
from policies.learned.models.keys import key_of
from policies.learned.models.prior import DEFAULT_CALIBRATION, StepCost
from policies.learned.models.step_time import weighed
from policies.learned.predict import Predictor
from policies.learned.settings import Objective
from policies.load import LoadMeter
from policies.load_policy import LoadSettings
from tests.policies.distill.drawn_pool import pool, request


def test_time_in_the_fluid_pool_follows_the_step_costs() -> None:
    cost = StepCost(0.010, 0.001, 1e-6, 1e-4)
    predictor = Predictor(LoadMeter())
    (backend,) = fluid_pool(predictor, pool()[:1])
    backend = FluidBackend(backend.name, backend.method, backend.draft_schedule, 1.0, cost)
    features = request(prompt_tokens=200)
    single = Job(features, key_of(features), 100.0, 0.0)

    def step_s(context: float) -> float:
        return 0.010 + 0.001 + 1e-6 * context

    prompt_s = weighed(200, 0, predictor.attention) * 1e-4
    mean_s = play([single], predictor, [backend], lambda job, backends, now_s: 0, lambda number: None)
    assert mean_s == pytest.approx(prompt_s + 100 * step_s(250))
    assert backend.in_flight == 0

    # The second arrives half-way, computes its prompt while the first waits, shares its last steps and continues alone.
    half_s = prompt_s + 50 * step_s(250)
    both = [single, Job(features, key_of(features), 100.0, half_s)]
    (backend,) = [FluidBackend(backend.name, backend.method, backend.draft_schedule, 1.0, cost)]
    ended: list[int] = []
    mean_s = play(both, predictor, [backend], lambda job, backends, now_s: 0, ended.append)
    shared_s = prompt_s + 50 * (0.010 + 2 * 0.001 + 1e-6 * 500)
    assert mean_s == pytest.approx(((half_s + shared_s) + (shared_s + 50 * step_s(250))) / 2)
    assert ended == [0, 1]


CHOICE = FluidChoice(FittedModels(), DEFAULT_CALIBRATION, cost_of(Objective.LATENCY, None, None), pool())
OBSERVED = {
    key_of(request(workload=workload, template=template, prompt_tokens=tokens)): count
    for workload, template, tokens, count in (("code", "", 90, 3.0), ("chat", "0badcafe", 900, 1.0))
}


@pytest.mark.slow
def test_synthetic_traffic_has_the_observed_frequencies_and_the_given_load() -> None:
    traffic = LikelyTraffic(CHOICE.predictor(), OBSERVED, 0)
    code = sum(features.workload == "code" for _, features in traffic.kinds)
    assert code / len(traffic.kinds) == pytest.approx(0.75, abs=0.01)
    assert all(key_of(features) == key for key, features in traffic.kinds)
    jobs = traffic.jobs(pool(), 16.0)
    assert [job.arrives_s for job in jobs] == sorted(job.arrives_s for job in jobs)
    assert sum(job.left < 1 for job in jobs) == 64
    loads = []

    class Recording(LeastLoaded):
        def choose(self, request, candidates):  # type: ignore[no-untyped-def]
            loads.append(sum(candidate.in_flight for candidate in candidates) / len(candidates))
            return super().choose(request, candidates)

    CHOICE.by_policy(jobs, Recording(LoadSettings(seed=0)))
    assert 8 < np.mean(loads[64:]) < 32


def test_a_drawn_request_is_of_its_key() -> None:
    rng = Random(0)
    for workload, code, overlap, temperature, tokens, limit, turns in product(
        ("", "chat"), (0.0, 0.9), (0.0, 0.5), (0.0, 0.9), (9, 300, 40_000), (None, 20, 6000), (1, 5)
    ):
        key = key_of(
            request(
                workload=workload,
                code_share=code,
                overlap=overlap,
                temperature=temperature,
                prompt_tokens=tokens,
                max_tokens=limit,
                turns=turns,
            )
        )
        assert key_of(representative(key, rng)) == key


def test_the_lengths_of_drawn_answers_scatter_about_the_predicted_mean() -> None:
    key = key_of(request(prompt_tokens=90))
    predictor = CHOICE.predictor()
    jobs = LikelyTraffic(predictor, {key: 1.0}, 0).jobs(pool(), 200.0)
    tokens = np.array([job.output_tokens for job in jobs])
    assert tokens.mean() == pytest.approx(predictor.fitted.length.tokens(request(prompt_tokens=90), key), rel=0.1)
    assert tokens.std() > 0.5 * tokens.mean()


def test_a_situation_reproduces_predictions_at_any_load() -> None:
    predictor = CHOICE.predictor()
    backends = fluid_pool(predictor, pool())
    kind = key_of(request(prompt_tokens=90)), request(prompt_tokens=90)

    def costs(kind: Kind) -> list[float]:
        return CHOICE.cost.of(kind[1], predictor.predict(kind[1], kind[0], backends))[0]

    for backend, prediction in zip(backends, predictor.predict(kind[1], kind[0], backends), strict=True):
        backend.in_flight = 3
        predictor.backend_models[backend.name].backlog.send(prediction, 0.0)
    log = SituationLog([kind])
    log.add(backends, costs)
    log.end_run()
    situations = log.situations([1.0, 1.0, 1.0, 2.0])
    assert [backend.in_flight for backend in backends] == [3, 3, 3, 3]
    assert set(situations.keys) == {kind[0]}
    assert situations.requests[0] == pytest.approx([3.0, 3.0, 3.0, 1.5])
    assert situations.costs_s[0] == pytest.approx(costs(kind))
    for backend in backends:
        backend.in_flight = 20
    at_20 = situations.idle_s[0] + situations.each_s[0] * [20.0, 20.0, 20.0, 10.0]
    assert at_20 == pytest.approx(costs(kind))


def test_a_situation_has_costs_that_grow_many_times_over() -> None:
    (backend,) = fluid_pool(CHOICE.predictor(), pool()[:1])
    log = SituationLog([(key_of(request()), request())])
    log.add([backend], lambda kind: [0.1 + backend.in_flight])
    log.end_run()
    situations = log.situations([1.0])
    assert (situations.idle_s[0], situations.each_s[0]) == (pytest.approx([0.1]), pytest.approx([1.0]))


def test_situations_are_logged_for_an_objective_with_bounds() -> None:
    goodput = replace(CHOICE, cost=cost_of(Objective.GOODPUT, 0.001, None))
    traffic = LikelyTraffic(CHOICE.predictor(), OBSERVED, 0)
    jobs = traffic.jobs(pool(), 1.0)
    costs = []
    for choice in (CHOICE, goodput):
        log = SituationLog(traffic.kinds)
        choice.by_prediction(jobs, log)
        costs.append(log.situations([1.0] * 4).costs_s.mean())
    assert costs[1] > 2.0 * costs[0], "what misses its bound costs more"


def test_every_kind_is_logged_equally_often_and_runs_have_equal_weight() -> None:
    traffic = LikelyTraffic(CHOICE.predictor(), OBSERVED, 0)
    log = SituationLog(traffic.kinds)
    for level in (1.0, 4.0):
        jobs = traffic.jobs(pool(), level)
        assert CHOICE.by_prediction(jobs, log) == CHOICE.by_prediction(jobs), "logging must not affect choices"
    situations = log.situations([1.0] * 4)
    assert Counter(situations.keys)[next(iter(OBSERVED))] / len(situations.keys) == pytest.approx(0.75, abs=0.01)
    half = len(situations.keys) // 2  # both runs have equal length
    weighted = situations.weights * situations.costs_s.sum(axis=1)
    assert (weighted[:half].sum(), weighted[half:].sum()) == (pytest.approx(1.0), pytest.approx(1.0))
    assert situations.requests[half:].mean() > 2 * situations.requests[:half].mean()
