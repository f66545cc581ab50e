"""The pool in which everything takes what was learned: its time, and what choosing in it notes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.distill.fluid import FluidBackend, Job, Kind, fluid_pool, play
from policies.distill.fluid_choice import FluidChoice, Notes
from policies.distill.traffic import LikelyTraffic, Mix
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.cost import cost_of
from policies.learned.models.backend_model import FittedModels
from policies.learned.models.buckets import LIMIT, key_of
from policies.learned.models.prior import DEFAULT_CALIBRATION, StepCost
from policies.learned.predict import Predictor
from policies.learned.settings import Objective
from policies.load import LoadMeter
from policies.load_balancing import LeastLoaded, LoadSettings


def pool() -> list[Backend]:
    drafted = {"baseline": 0, "ngram": 5, "suffix": 24, "eagle3": 3}
    return [
        Backend(name, "m", Method(name), "http://127.0.0.1:9", num_speculative_tokens=k) for name, k in drafted.items()
    ]


def request(**features: object) -> RequestFeatures:
    return RequestFeatures("m", Endpoint.CHAT, **features)  # type: ignore[arg-type]


def test_time_in_the_fluid_pool_is_that_of_the_steps_it_takes() -> None:
    cost = StepCost(0.010, 0.001, 1e-6, 1e-4)
    predictor = Predictor(LoadMeter())
    (backend,) = fluid_pool(predictor, pool()[:1])
    backend = FluidBackend(backend.name, backend.method, 0, 1.0, cost)
    asked = request(prompt_tokens=200)
    one = Job(asked, key_of(asked), 100.0, 0.0)

    def alone(context: float) -> float:
        return 0.010 + 0.001 + 1e-6 * context

    took_s = play([one], predictor, [backend], lambda job, backends, now_s: 0, lambda number: None)
    assert took_s == pytest.approx(200 * 1e-4 + 100 * alone(250))
    assert backend.in_flight == 0

    # The second comes half-way, computes its prompt while the first waits, shares its last steps, and goes on alone.
    half_s = 200 * 1e-4 + 50 * alone(250)
    both = [one, Job(asked, key_of(asked), 100.0, half_s)]
    (backend,) = [FluidBackend(backend.name, backend.method, 0, 1.0, cost)]
    ended: list[int] = []
    took_s = play(both, predictor, [backend], lambda job, backends, now_s: 0, ended.append)
    shared_s = 200 * 1e-4 + 50 * (0.010 + 2 * 0.001 + 1e-6 * 500)
    assert took_s == pytest.approx(((half_s + shared_s) + (shared_s + 50 * alone(250))) / 2)
    assert ended == [0, 1]


CHOICE = FluidChoice(FittedModels(), DEFAULT_CALIBRATION, cost_of(Objective.LATENCY, None, None), pool())
SEEN = {
    key_of(request(workload=workload, template=template, prompt_tokens=tokens)): count
    for workload, template, tokens, count in (("code", "", 90, 3.0), ("chat", "0badcafe", 900, 1.0))
}

ENDS = [key_of(request(max_tokens=limit)) for limit in (20, None)]


def test_likely_requests_come_as_often_as_they_were_seen_and_load_the_pool_as_asked() -> None:
    traffic = LikelyTraffic(CHOICE.predictor(), SEEN, 0)
    code = sum(features.workload == "code" for _, features in traffic.kinds)
    assert code / len(traffic.kinds) == pytest.approx(0.75, abs=0.01)
    assert all(key_of(features) == key for key, features in traffic.kinds)
    jobs = traffic.jobs(pool(), 16.0)
    assert [job.arrives_s for job in jobs] == sorted(job.arrives_s for job in jobs)
    assert sum(job.left < 1 for job in jobs) == 64
    seen = []

    class Watching(LeastLoaded):
        def choose(self, request, candidates):  # type: ignore[no-untyped-def]
            seen.append(sum(one.in_flight for one in candidates) / len(candidates))
            return super().choose(request, candidates)

    CHOICE.by_policy(jobs, Watching(LoadSettings(seed=0)))
    assert 8 < np.mean(seen[64:]) < 32


def test_a_mix_has_more_of_the_long_or_of_the_short_answers() -> None:
    traffic = LikelyTraffic(CHOICE.predictor(), dict.fromkeys(ENDS, 1.0), 0)
    long = {mix: np.mean([job.key[LIMIT] == "" for job in traffic.jobs(pool(), 8.0, mix)]) for mix in Mix}
    assert 0.35 < long[Mix.SEEN] < 0.65
    assert long[Mix.SHORT] < 0.3
    assert long[Mix.LONG] > 0.7


def test_a_situation_tells_what_is_predicted_at_any_number_of_requests() -> None:
    predictor = CHOICE.predictor()
    backends = fluid_pool(predictor, pool())
    kind = key_of(request(prompt_tokens=90)), request(prompt_tokens=90)

    def costs(kind: Kind) -> list[float]:
        return [CHOICE.cost.of(kind[1], one) for one in predictor.predict(kind[1], kind[0], backends, 0.0)]

    for backend, one in zip(backends, predictor.predict(kind[1], kind[0], backends, 0.0), strict=True):
        backend.in_flight = 3
        predictor.known[backend.name].backlog.send(one.share, 0.0)
    notes = Notes([kind])
    notes.add(backends, costs)
    notes.end_run()
    situations = notes.situations([1.0, 1.0, 1.0, 2.0])
    assert [backend.in_flight for backend in backends] == [3, 3, 3, 3]
    assert set(situations.keys) == {kind[0]}
    assert situations.requests[0] == pytest.approx([3.0, 3.0, 3.0, 1.5])
    assert situations.costs_s[0] == pytest.approx(costs(kind))
    for backend in backends:
        backend.in_flight = 20
    at_20 = situations.idle_s[0] + situations.each_s[0] * [20.0, 20.0, 20.0, 10.0]
    assert at_20 == pytest.approx(costs(kind))


def test_every_kind_is_noted_equally_often_and_each_run_weighs_the_same() -> None:
    traffic = LikelyTraffic(CHOICE.predictor(), SEEN, 0)
    notes = Notes(traffic.kinds)
    for level in (1.0, 4.0):
        jobs = traffic.jobs(pool(), level)
        assert CHOICE.by_prediction(jobs, notes) == CHOICE.by_prediction(jobs), "noting changes nothing"
    situations = notes.situations([1.0] * 4)
    assert Counter(situations.keys)[next(iter(SEEN))] / len(situations.keys) == pytest.approx(0.75, abs=0.01)
    half = len(situations.keys) // 2  # both runs are as long
    weighed = situations.weights * situations.costs_s.sum(axis=1)
    assert (weighed[:half].sum(), weighed[half:].sum()) == (pytest.approx(1.0), pytest.approx(1.0))
    assert situations.requests[half:].mean() > 2 * situations.requests[:half].mean()


def test_situations_again_with_nothing_declared() -> None:
    traffic = LikelyTraffic(CHOICE.predictor(), SEEN, 0)
    notes = Notes(traffic.kinds)
    CHOICE.by_prediction(traffic.jobs(pool(), 1.0), notes)
    situations = notes.situations([1.0] * 4)
    both, count = situations.with_undeclared(0.25), len(situations.keys)
    assert both.keys[:count] == situations.keys
    assert {key[:2] for key in both.keys[count:]} == {("", "")}
    assert [key[2:] for key in both.keys[count:]] == [key[2:] for key in situations.keys]
    assert both.weights[count:] == pytest.approx(0.25 * situations.weights)
    assert both.costs_s[count:] == pytest.approx(situations.costs_s)
