"""Answer length: typical at first, then learned from similar requests, never above the limit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from policies.features.request import TYPICAL_TOKENS, Endpoint, RequestFeatures
from policies.learned.models.keys import key_of
from policies.learned.models.length import LengthModel
from policies.statistics import Sums

REQUEST = RequestFeatures("m", Endpoint.CHAT, workload="chat", template="t", prompt_tokens=200)


def _tokens(model: LengthModel, request: RequestFeatures) -> float:
    return model.tokens(request, key_of(request))


def _sums(lengths: np.ndarray | list[float]) -> Sums:
    logs = np.log(np.asarray(lengths, float))
    return (float(len(logs)), float(logs.sum()), float((logs**2).sum()))


def test_without_observations_an_answer_has_typical_length() -> None:
    for model in (LengthModel(), LengthModel.fit({})):
        assert _tokens(model, REQUEST) == TYPICAL_TOKENS


def test_the_limit_is_respected_and_sequences_add_up() -> None:
    model = LengthModel()
    assert _tokens(model, replace(REQUEST, max_tokens=16)) == 16
    assert _tokens(model, replace(REQUEST, max_tokens=100_000)) == TYPICAL_TOKENS
    assert _tokens(model, replace(REQUEST, max_tokens=0)) == 1
    assert _tokens(model, replace(REQUEST, n=4)) == 4 * TYPICAL_TOKENS
    assert _tokens(model, replace(REQUEST, n=4, max_tokens=16)) == 64


def test_the_mean_of_skewed_lengths_is_predicted_not_their_median() -> None:
    rng = np.random.default_rng(1)
    lengths = np.exp(rng.normal(math.log(90), 0.6, 2000))
    model = LengthModel.fit({key_of(REQUEST): _sums(lengths)})
    assert _tokens(model, REQUEST) == pytest.approx(lengths.mean(), rel=0.05)


def test_templates_differ_and_new_ones_follow_their_workload() -> None:
    long, short = replace(REQUEST, workload="code"), REQUEST
    seen = {}
    for number in range(6):
        seen[key_of(replace(long, template=f"a{number}"))] = _sums([800.0] * 40)
        seen[key_of(replace(short, template=f"b{number}"))] = _sums([40.0] * 40)
    seen[key_of(replace(short, template="exception"))] = _sums([800.0] * 40)
    model = LengthModel.fit(seen)
    assert _tokens(model, replace(short, template="exception")) > 4 * _tokens(model, replace(short, template="b1"))
    assert _tokens(model, replace(long, template="new")) > 4 * _tokens(model, replace(short, template="new"))


def test_a_single_answer_moves_the_prediction_only_in_part() -> None:
    once = LengthModel.fit({key_of(REQUEST): _sums([8.0])})
    often = LengthModel.fit({key_of(REQUEST): _sums([8.0] * 100)})
    assert _tokens(often, REQUEST) < 15 < _tokens(once, REQUEST) < TYPICAL_TOKENS * 1.5


def test_the_prediction_is_bounded() -> None:
    model = LengthModel.fit({key_of(REQUEST): _sums([1e9] * 1000)})
    assert _tokens(model, REQUEST) <= 1e6
