"""A prediction: the time of the request itself, and the delay that it causes to others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from backends.backend import Backend, EngineLoad
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.cost import Cost, cost_of
from policies.learned.models.acceptance import AcceptanceModel
from policies.learned.models.backend_model import FittedModels, Prediction
from policies.learned.models.keys import key_of
from policies.learned.models.prior import DEFAULT_CALIBRATION, StepCost, attention_share, expected_step
from policies.learned.models.step_time import weighed
from policies.learned.predict import Predictor
from policies.learned.settings import Objective
from policies.load import LoadMeter
from tests.support.work import work

REQUEST = RequestFeatures("m", Endpoint.CHAT, temperature=0.0, workload="chat", template="t", prompt_tokens=400)
PROMPT = weighed(400, 0, attention_share(DEFAULT_CALIBRATION))
NOW_S = 100.0


def _backend(name: str = "e", method: Method = Method.EAGLE3, k: int = 3, in_flight: int = 0) -> Backend:
    return Backend(name, "m", method, "http://x", num_speculative_tokens=k, in_flight=in_flight)


def _predictor() -> Predictor:
    return Predictor(LoadMeter())


def _predict(predictor: Predictor, candidate: Backend, request: RequestFeatures = REQUEST) -> Prediction:
    return predictor.predict(request, key_of(request), [candidate])[0]


def _cost(cost: Cost, request: RequestFeatures, prediction: Prediction) -> float:
    """Return the cost of a request that is then sent."""
    (cost_s,), cost.mean_urgency = cost.of(request, [prediction])
    return cost_s


def _busy(predictor: Predictor, candidate: Backend, requests: int, share: Prediction) -> Backend:
    for _ in range(requests):
        predictor.of(candidate).backlog.send(share, NOW_S)
    return replace(candidate, in_flight=requests)


def test_alone_a_request_takes_its_steps_times_the_step_time() -> None:
    predictor, backend = _predictor(), _backend()
    prediction = _predict(predictor, backend)
    cost = expected_step(DEFAULT_CALIBRATION, Method.EAGLE3, 3)
    assert prediction.steps == pytest.approx(prediction.output_tokens / prediction.tokens_per_step)
    step_s = cost.base_s + cost.per_request_s + cost.per_context_token_s * (400 + prediction.output_tokens / 2)
    assert prediction.step_s == pytest.approx(step_s)
    assert prediction.decode_s == pytest.approx(prediction.steps * step_s)
    assert prediction.ttft_s == pytest.approx(1.5 * step_s + PROMPT * cost.per_prompt_token_s)
    assert prediction.own_s == prediction.ttft_s + prediction.decode_s
    assert prediction.others_s == 0.0


def test_others_are_delayed_by_shared_steps_and_by_the_prompt() -> None:
    predictor, others = _predictor(), work(50.0, 800.0, 300.0)
    backend = _busy(predictor, _backend(), 8, others)
    prediction = _predict(predictor, backend)
    cost = expected_step(DEFAULT_CALIBRATION, Method.EAGLE3, 3)
    shared = 8 * prediction.steps * 50.0 / (prediction.steps + 50.0)
    own_step_s = cost.per_request_s + cost.per_context_token_s * prediction.context_tokens
    assert prediction.requests == 8
    assert prediction.others_s == pytest.approx(shared * own_step_s + 8 * PROMPT * cost.per_prompt_token_s)
    alone = _predict(_predictor(), _backend())
    assert prediction.decode_s > alone.decode_s
    assert prediction.step_s > alone.step_s
    assert _cost(cost_of(Objective.LATENCY, None, None), REQUEST, prediction) == pytest.approx(
        prediction.own_s + prediction.others_s
    )
    for objective in (Objective.LATENCY, Objective.GOODPUT):
        greedy = _cost(cost_of(objective, None, None), replace(REQUEST, overuse=3.0), prediction)
        assert greedy == pytest.approx(prediction.own_s + 3.0 * prediction.others_s), "of a client beyond its share"


def test_a_long_prompt_delays_others_more_than_a_short_one() -> None:
    predictor = _predictor()
    backend = _busy(predictor, _backend(), 8, work(50.0, 800.0, 300.0))
    short, long = (_predict(predictor, backend, replace(REQUEST, prompt_tokens=tokens)) for tokens in (100, 8000))
    cost = expected_step(DEFAULT_CALIBRATION, Method.EAGLE3, 3)
    assert long.others_s - short.others_s >= 8 * 7900 * cost.per_prompt_token_s
    assert long.ttft_s > short.ttft_s


def test_the_tokens_before_a_prompt_token_raise_its_price() -> None:
    predictor, plain = _predictor(), _predictor()
    predictor.attention, plain.attention = 1e-4, 0.0
    request = replace(REQUEST, prompt_tokens=20_000, prefix=(1, 2), prefix_tokens=(8_000, 16_000))
    token_s = expected_step(DEFAULT_CALIBRATION, Method.EAGLE3, 3).per_prompt_token_s
    for cached in (0, 8_000, 16_000):
        backend = _backend(f"after-{cached}", in_flight=2)
        for one in (predictor, plain):
            if cached:
                known = cached // 8_000
                one.of(backend).prefixes.remember(request.prefix[:known], request.prefix_tokens[:known])
        with_attention, without = (_predict(one, backend, request) for one in (predictor, plain))
        more_s = token_s * 1e-4 * sum(range(cached, 20_000))
        assert with_attention.prefill_s == pytest.approx(token_s * (20_000 - cached) + more_s, rel=1e-3)
        assert with_attention.ttft_s - without.ttft_s == pytest.approx(more_s, rel=1e-3)
        assert with_attention.others_s - without.others_s == pytest.approx(2 * more_s, rel=1e-3)
        assert with_attention.prompt_tokens == without.prompt_tokens == 20_000 - cached


def test_a_long_answer_shares_at_most_the_steps_of_the_others() -> None:
    predictor = _predictor()
    backend = _busy(predictor, _backend(), 4, work(10.0, 500.0, 100.0))
    prediction = _predict(predictor, backend, replace(REQUEST, n=1, prompt_tokens=1))
    cost = expected_step(DEFAULT_CALIBRATION, Method.EAGLE3, 3)
    own_step_s = cost.per_request_s + cost.per_context_token_s * prediction.context_tokens
    assert prediction.others_s < 4 * 10.0 * own_step_s + 4 * cost.per_prompt_token_s + 1e-9


def test_cached_prompt_tokens_are_not_computed() -> None:
    predictor, backend = _predictor(), _backend()
    backend = _busy(predictor, backend, 4, work(50.0, 800.0, 300.0))
    request = replace(REQUEST, prompt_tokens=4000, prefix=(1, 2, 3), prefix_tokens=(1000, 2000, 3900))
    cold = _predict(predictor, backend, request)
    predictor.of(backend).prefixes.remember(request.prefix, request.prefix_tokens)
    warm = _predict(predictor, backend, request)
    assert (cold.prompt_tokens, warm.prompt_tokens) == (4000, 100)
    assert warm.ttft_s < cold.ttft_s
    assert warm.others_s < cold.others_s
    assert warm.decode_s == cold.decode_s
    for _ in range(100):
        predictor.of(backend).prefixes.learn(4000 - _predict(predictor, backend, request).prompt_tokens, 0)
    distrusted = _predict(predictor, backend, request)
    assert distrusted.prompt_tokens > 3800


def test_what_a_full_cache_evicts_is_computed_again_beside_the_requests_of_the_pool() -> None:
    predictor, load = _predictor(), EngineLoad(kv_tokens=1000)
    empty, full = (replace(_backend(name), load=load) for name in ("empty", "full"))
    known = replace(REQUEST, prompt_tokens=900, prefix=(1,), prefix_tokens=(900,))
    predictor.of(full).prefixes.remember(known.prefix, known.prefix_tokens)
    request = replace(REQUEST, prompt_tokens=400, prefix=(2,), prefix_tokens=(400,))

    def lost_s(elsewhere: int) -> list[float]:
        pool = [empty, full, _busy(predictor, _backend("busy"), elsewhere, work(50.0, 800.0, 300.0))]
        return [one.others_s / one.prefill_s for one in predictor.predict(request, key_of(request), pool)[:2]]

    assert lost_s(0) == pytest.approx([0.0, 0.0]), "an engine would have little else to do"
    assert lost_s(6) == pytest.approx([0.0, 2.0 * (2 / 6) * (1 + 6 / 3)])
    assert lost_s(30) == pytest.approx([0.0, 2.0 * (1 + 30 / 3)])
    assert _predict(predictor, full, known).others_s == 0.0  # it finds its own


def test_a_prompt_that_another_gateway_has_sent_delays_the_next_one() -> None:
    predictor, backend = _predictor(), _backend(in_flight=1)
    told, request = (1, 2), replace(REQUEST, prompt_tokens=400)
    before = _predict(predictor, backend, request)
    predictor.now_s = NOW_S
    predictor.of(backend).hear(told, (3000, 6000), NOW_S, predictor.attention)
    after = _predict(predictor, backend, request)
    token_s = expected_step(DEFAULT_CALIBRATION, Method.EAGLE3, 3).per_prompt_token_s
    waited_s = token_s * weighed(6000, 0, predictor.attention)
    assert after.ttft_s - before.ttft_s == pytest.approx(waited_s)
    predictor.of(backend).hear(told, (3000, 6000), NOW_S, predictor.attention)
    assert _predict(predictor, backend, request).ttft_s == pytest.approx(after.ttft_s), "it is cached then"
    predictor.now_s = NOW_S + waited_s / 2
    assert _predict(predictor, backend, request).ttft_s - before.ttft_s == pytest.approx(waited_s / 2)
    predictor.now_s = NOW_S + 2 * waited_s
    assert _predict(predictor, backend, request).ttft_s == pytest.approx(before.ttft_s)


def test_a_conversation_is_cheapest_where_its_prefix_is_cached() -> None:
    predictor = _predictor()
    two = [_backend("e1"), _backend("e2")]
    request = replace(REQUEST, prompt_tokens=6000, prefix=(1, 2), prefix_tokens=(3000, 5900))
    predictor.of(two[1]).prefixes.remember(request.prefix, request.prefix_tokens)
    costs = [prediction.own_s + prediction.others_s for prediction in predictor.predict(request, key_of(request), two)]
    assert costs[1] < costs[0]


def test_waiting_delays_the_first_token() -> None:
    predictor = _predictor()
    backend = _busy(predictor, _backend(), 40, work(50.0, 800.0, 300.0))
    free = _predict(predictor, backend)
    full = _predict(predictor, replace(backend, load=EngineLoad(running=30, waiting=10)))
    assert full.ttft_s > free.ttft_s + 0.1 * free.decode_s
    assert full.decode_s == free.decode_s


def test_several_sequences_delay_others_like_several_requests() -> None:
    predictor = _predictor()
    backend = _busy(predictor, _backend(), 8, work(50.0, 800.0, 300.0))
    tiny = replace(REQUEST, prompt_tokens=1)
    one, four = (_predict(predictor, backend, replace(tiny, n=n)) for n in (1, 4))
    assert four.output_tokens == one.output_tokens
    assert four.others_s == pytest.approx(4 * one.others_s, rel=0.02)


def test_fitted_models_replace_the_prior() -> None:
    predictor, backend = _predictor(), _backend()
    before = _predict(predictor, backend)
    key = key_of(REQUEST)
    log = math.log(4.0)
    acceptance = AcceptanceModel.fit({("eagle3:3", "e", *key): (100.0, 100 * log, 100 * log**2)}, DEFAULT_CALIBRATION)
    predictor.learn(FittedModels(acceptance, steps={"e": StepCost(0.1, 0.0, 0.0, 0.0)}))
    after = _predict(predictor, backend)
    assert after.tokens_per_step == pytest.approx(4.0, rel=0.05) != before.tokens_per_step
    assert after.step_s == pytest.approx(0.1)
    assert predictor.of(backend).acceptance(key)[1] == 100
    # A backend that is added later uses the fitted models too.
    assert _predict(predictor, _backend("e2")).tokens_per_step == pytest.approx(4.0, rel=0.2)


def test_slowness_scales_every_predicted_time() -> None:
    predictor = _predictor()
    backend = _busy(predictor, _backend(), 4, work(50.0, 800.0, 300.0))
    before = _predict(predictor, backend)
    predictor.of(backend).slowness = 2.0
    after = _predict(predictor, backend)
    for name in ("ttft_s", "decode_s", "others_s", "step_s"):
        assert getattr(after, name) == pytest.approx(2 * getattr(before, name))


def test_a_request_waits_for_the_prompts_before_it() -> None:
    predictor = _predictor()
    backend = _backend()
    idle = _predict(predictor, backend)
    predictor.of(backend).backlog.send(work(50.0, 800.0, 90_000.0, prefill_s=2.0), now_s=100.0)
    backend.in_flight = 1
    waits = []
    for predictor.now_s in (100.0, 101.5, 103.0):
        waits.append(_predict(predictor, backend).ttft_s)
    assert waits[0] - waits[1] == pytest.approx(1.5)
    assert waits[1] - waits[2] == pytest.approx(0.5)
    assert waits[2] < idle.ttft_s + 0.1


CONFIG = {"num_speculative_tokens_per_batch_size": [[1, 48, 3], [49, 96, 1], [97, 999, 0]]}


def _scheduled(in_flight: int = 0) -> Backend:
    return replace(_backend(in_flight=in_flight), speculative_config=CONFIG)


@pytest.mark.parametrize(("requests", "k"), [(8, 3), (72, 1), (300, 0)])
def test_a_schedule_sets_the_k_of_the_batch_that_a_request_meets(requests: int, k: int) -> None:
    shares = work(50.0, 800.0, 300.0)
    predictor, fixed = _predictor(), _predictor()
    met = _predict(predictor, _busy(predictor, _scheduled(), requests, shares))
    same = _predict(
        fixed, _busy(fixed, _backend(method=Method.EAGLE3 if k else Method.BASELINE, k=k), requests, shares)
    )
    assert met.tokens_per_step == pytest.approx(same.tokens_per_step, rel=0.02)
    for name in ("step_s", "decode_s", "others_s"):
        assert getattr(met, name) == pytest.approx(getattr(same, name), rel=0.03)


def test_a_schedule_that_never_applies_changes_nothing() -> None:
    never = {"num_speculative_tokens_per_batch_size": [[1, 900, 3], [901, 999, 0]]}
    shares = work(50.0, 800.0, 300.0)
    one, other = _predictor(), _predictor()
    plain = _predict(one, _busy(one, _backend(), 20, shares))
    unused = _predict(other, _busy(other, replace(_backend(), speculative_config=never), 20, shares))
    for name in ("ttft_s", "decode_s", "others_s", "step_s", "tokens_per_step"):
        assert getattr(unused, name) == pytest.approx(getattr(plain, name))


def test_joining_where_k_falls_delays_all_others_by_the_tokens_that_they_lose() -> None:
    shares = work(50.0, 800.0, 300.0)
    config = {"num_speculative_tokens_per_batch_size": [[1, 32, 3], [33, 999, 0]]}
    backend = replace(_backend(), speculative_config=config)

    def per_request_s(requests: int) -> float:
        predictor = _predictor()
        busy = _busy(predictor, backend, requests, shares)
        return _predict(predictor, busy, replace(REQUEST, prompt_tokens=1)).others_s / requests

    assert per_request_s(32) > 3 * per_request_s(12)
    assert per_request_s(32) > 3 * per_request_s(70)


def test_adaptive_verification_is_expected_to_verify_less_in_larger_batches() -> None:
    shares, predictor, eager = work(50.0, 800.0, 300.0), _predictor(), _predictor()
    backend = _backend(method=Method.DSPARK, k=7)
    adaptive = replace(backend, speculative_config={"enable_adaptive_verification": True})
    alone, beside = _predict(predictor, adaptive), _predict(predictor, _busy(predictor, adaptive, 128, shares))
    fixed = _predict(eager, _busy(eager, backend, 128, shares))
    assert beside.tokens_per_step < 0.9 * alone.tokens_per_step
    assert beside.step_s < 0.8 * fixed.step_s
    assert beside.decode_s < fixed.decode_s


def _prediction(ttft_s: float, step_s: float, others_s: float = 0.0) -> Prediction:
    return Prediction(ttft_s, 100 * step_s, others_s, step_s, 100.0, 2.0, 200.0, 500.0, 400.0, 3)


def test_goodput_meets_an_slo_at_the_expense_of_others() -> None:
    cost = cost_of(Objective.GOODPUT, None, 0.010)
    quick, slow = _prediction(0.1, 0.015, others_s=2.0), _prediction(0.1, 0.030)
    assert _cost(cost, REQUEST, quick) < _cost(cost, REQUEST, slow)  # 7.5 ms per token against 15
    plain = cost_of(Objective.LATENCY, None, None)
    assert _cost(plain, REQUEST, quick) > _cost(plain, REQUEST, slow)


def test_requests_without_an_slo_yield_to_those_with_one() -> None:
    cost = cost_of(Objective.GOODPUT, None, None)
    alone, beside = _prediction(0.1, 0.015), _prediction(0.1, 0.0145, others_s=0.045)
    assert _cost(cost, REQUEST, beside) < _cost(cost, REQUEST, alone)
    strict = replace(REQUEST, slo_tpot_s=0.003)
    for _ in range(2000):
        _cost(cost, strict, alone)
    assert _cost(cost, REQUEST, beside) > _cost(cost, REQUEST, alone)


def test_computing_a_cost_does_not_change_the_mean_urgency() -> None:
    cost, one, strict = (
        cost_of(Objective.GOODPUT, None, None),
        _prediction(0.1, 0.015, 1.0),
        replace(REQUEST, slo_tpot_s=1e-6),
    )
    for _ in range(100):
        _cost(cost, strict, one)
    before = cost.of(REQUEST, [one])
    assert before[0][0] > one.own_s + one.others_s
    (_, urgency), (_, at_once) = cost.of(strict, [one]), cost.of(strict, [one, one])
    assert at_once > urgency > cost.mean_urgency
    assert cost.of(REQUEST, [one]) == before


def test_the_slo_of_a_request_overrides_the_default() -> None:
    cost = cost_of(Objective.GOODPUT, 10.0, None)
    late, early = _prediction(0.5, 0.010), _prediction(0.05, 0.015)
    assert _cost(cost, REQUEST, late) < _cost(cost, REQUEST, early)  # both meet the default of ten seconds
    strict = replace(REQUEST, slo_ttft_s=0.1)
    assert _cost(cost, strict, late) > _cost(cost, strict, early)


def test_goodput_without_an_slo_equals_latency() -> None:
    cost, plain = cost_of(Objective.GOODPUT, None, None), cost_of(Objective.LATENCY, None, None)
    one = _prediction(0.5, 0.010, 0.7)
    assert _cost(cost, REQUEST, one) == pytest.approx(_cost(plain, REQUEST, one))


def test_each_objective_minimises_its_own_time() -> None:
    first, tokens = _prediction(0.1, 0.020), _prediction(1.0, 0.012)
    ttft, tpot = cost_of(Objective.TTFT, None, None), cost_of(Objective.TPOT, None, None)
    assert _cost(ttft, REQUEST, first) < _cost(ttft, REQUEST, tokens)
    assert _cost(tpot, REQUEST, tokens) < _cost(tpot, REQUEST, first)
