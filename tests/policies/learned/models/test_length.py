"""How long answers will be: typical at first, then as those to requests like this one, never beyond the limit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.buckets import key_of
from policies.learned.models.length import TYPICAL_TOKENS, LengthModel
from policies.statistics import Sums

REQUEST = RequestFeatures("m", Endpoint.CHAT, workload="chat", template="t", prompt_tokens=200)


def _tokens(model: LengthModel, request: RequestFeatures) -> float:
    return model.tokens(request, key_of(request))


def _seen(lengths: np.ndarray | list[float]) -> Sums:
    logs = np.log(np.asarray(lengths, float))
    return (float(len(logs)), float(logs.sum()), float((logs**2).sum()))


def test_before_anything_is_seen_an_answer_is_typical() -> None:
    for model in (LengthModel(), LengthModel.fit({})):
        assert _tokens(model, REQUEST) == TYPICAL_TOKENS


def test_the_limit_is_a_limit_and_sequences_add_up() -> None:
    model = LengthModel()
    assert _tokens(model, replace(REQUEST, max_tokens=16)) == 16
    assert _tokens(model, replace(REQUEST, max_tokens=100_000)) == TYPICAL_TOKENS
    assert _tokens(model, replace(REQUEST, max_tokens=0)) == 1
    assert _tokens(model, replace(REQUEST, n=4)) == 4 * TYPICAL_TOKENS
    assert _tokens(model, replace(REQUEST, n=4, max_tokens=16)) == 64


def test_the_mean_of_skewed_lengths_is_predicted_not_their_median() -> None:
    rng = np.random.default_rng(1)
    lengths = np.exp(rng.normal(math.log(90), 0.6, 2000))
    model = LengthModel.fit({key_of(REQUEST): _seen(lengths)})
    assert _tokens(model, REQUEST) == pytest.approx(lengths.mean(), rel=0.05)


def test_templates_differ_and_new_ones_are_as_their_workload() -> None:
    long, short = replace(REQUEST, workload="code"), REQUEST
    seen = {}
    for number in range(6):
        seen[key_of(replace(long, template=f"a{number}"))] = _seen([800.0] * 40)
        seen[key_of(replace(short, template=f"b{number}"))] = _seen([40.0] * 40)
    seen[key_of(replace(short, template="exception"))] = _seen([800.0] * 40)
    model = LengthModel.fit(seen)
    assert _tokens(model, replace(short, template="exception")) > 4 * _tokens(model, replace(short, template="b1"))
    assert _tokens(model, replace(long, template="new")) > 4 * _tokens(model, replace(short, template="new"))


def test_one_answer_is_not_yet_a_rule() -> None:
    once = LengthModel.fit({key_of(REQUEST): _seen([8.0])})
    often = LengthModel.fit({key_of(REQUEST): _seen([8.0] * 100)})
    assert _tokens(often, REQUEST) < 15 < _tokens(once, REQUEST) < TYPICAL_TOKENS * 1.5


def test_what_was_learned_cannot_run_off() -> None:
    model = LengthModel.fit({key_of(REQUEST): _seen([1e9] * 1000)})
    assert _tokens(model, REQUEST) <= 1e6
