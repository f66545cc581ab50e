"""Tokens per step by context: as the calibration has them, and as they are learned beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from backends.backend import Backend
from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.acceptance import AcceptanceModel
from policies.learned.models.backend_model import FittedModels
from policies.learned.models.keys import key_of
from policies.learned.models.prior import DEFAULT_CALIBRATION, expected_by_k, known_to_tokens
from policies.learned.predict import Predictor
from policies.load import LoadMeter

CONTEXT = load_calibration(DEFAULT_CALIBRATION).method(Method.EAGLE3).context
REQUEST = RequestFeatures("m", Endpoint.CHAT, temperature=0.0, workload="chat", prompt_tokens=1100, max_tokens=40)
HEAD = Backend("e", "m", Method.EAGLE3, "http://x", num_speculative_tokens=3)


def _expected(method: Method, tokens: float) -> float:
    return expected_by_k(DEFAULT_CALIBRATION, method, 3, "chat", 0.0, tokens)[-1]


def test_heads_accept_less_the_longer_the_context_and_lookups_as_much() -> None:
    assert CONTEXT is not None
    shifted = [_expected(Method.EAGLE3, tokens) for tokens in (500, 3000, 6000, 100_000)]
    assert shifted == sorted(shifted, reverse=True)
    assert shifted[0] > shifted[1] + 0.1
    assert _expected(Method.EAGLE3, 2 * CONTEXT.tokens[-1]) == _expected(Method.EAGLE3, 8 * CONTEXT.tokens[-1])
    for method in (Method.NGRAM, Method.SUFFIX):
        assert _expected(method, 500) == _expected(method, 100_000)


def test_the_context_of_a_prediction_is_the_prompt_and_half_of_the_answer() -> None:
    predictor = Predictor(LoadMeter())
    requests = [replace(REQUEST, prompt_tokens=tokens, max_tokens=None) for tokens in (4200, 5500, 8000)]
    assert len({key_of(request) for request in requests}) == 1
    for request in [*requests, *requests]:  # the second time from the cache
        (prediction,) = predictor.predict(request, key_of(request), [HEAD])
        assert prediction.context_tokens == request.prompt_tokens + prediction.output_tokens / 2
        expected = math.exp(_expected(Method.EAGLE3, prediction.context_tokens))
        assert prediction.tokens_per_step == pytest.approx(expected)


def test_what_a_long_answer_shows_holds_at_its_context_and_not_at_another() -> None:
    predictor = Predictor(LoadMeter())
    model, key = predictor.of(HEAD), key_of(REQUEST)
    shown = math.exp(_expected(Method.EAGLE3, 9000) + 0.2)  # a fifth more than expected
    learned, weight = model.as_learned(key, None, shown, 9000)
    log = math.log(learned)
    sums = 1000 * weight, 1000 * log, 1000 * log**2
    acceptance = AcceptanceModel.fit({("eagle3:3", "e", *key): sums}, DEFAULT_CALIBRATION)
    predictor.learn(FittedModels(acceptance))
    assert predictor.tokens_per_step("e", key, 9000) == pytest.approx(shown, rel=0.01)
    short = math.exp(_expected(Method.EAGLE3, 1200) + 0.2)
    assert predictor.tokens_per_step("e", key, 1200) == pytest.approx(short, rel=0.01)


def test_beyond_what_a_calibration_knows_few_answers_teach_much() -> None:
    known = known_to_tokens(DEFAULT_CALIBRATION, Method.EAGLE3)
    assert known < math.inf == known_to_tokens(DEFAULT_CALIBRATION, Method.NGRAM)
    moved = []
    for tokens in (int(known / 3), int(3 * known)):
        seen, unseen = (key_of(replace(REQUEST, prompt_tokens=tokens, workload=name)) for name in ("chat", "code"))
        model = AcceptanceModel(calibration=DEFAULT_CALIBRATION)
        log = model.expected(("eagle3:3", "e", *seen)) + 0.5
        model = AcceptanceModel.fit({("eagle3:3", "e", *seen): (3.0, 3 * log, 3 * log**2)}, DEFAULT_CALIBRATION)
        moved.append(
            math.log(model.tokens_per_step("eagle3:3", "e", unseen)) - model.expected(("eagle3:3", "e", *unseen))
        )
    assert moved[1] > 1.1 * moved[0] > 0.0
