"""Tokens per step: the calibration's before anything was seen, then the template's own by way of its workload."""

from __future__ import annotations

import math

import numpy as np
import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.acceptance import AcceptanceModel, arm_of
from policies.learned.models.buckets import TEMPLATE, Key, key_of, without_template
from policies.learned.models.prior import DEFAULT_CALIBRATION, expected_tokens_per_step
from policies.statistics import Sums

ARM = "eagle3:3"
CALIBRATION = DEFAULT_CALIBRATION


def _key(workload: str = "chat", template: str = "", temperature: float = 0.0) -> Key:
    return key_of(
        RequestFeatures(
            "m", Endpoint.CHAT, temperature=temperature, workload=workload, template=template, prompt_tokens=200
        )
    )


def _seen(tokens_per_step: float, count: int) -> Sums:
    log = math.log(tokens_per_step)
    return (float(count), count * log, count * log * log)


def _model(seen: dict[Key, Sums]) -> AcceptanceModel:
    return AcceptanceModel.fit(seen, CALIBRATION)


def test_an_arm_is_a_method_with_its_depth() -> None:
    def arm(method: Method, k: int) -> str:
        return arm_of(Backend("a", "m", method, "http://x", num_speculative_tokens=k))

    assert arm(Method.EAGLE3, 3) == "eagle3:3"
    assert arm(Method.SUFFIX, 0) == "suffix:24"
    assert arm(Method.NGRAM, 0) == "ngram:3"
    assert arm(Method.BASELINE, 0) == arm(Method.BASELINE, 5) == "baseline:0"


@pytest.mark.parametrize("workload", ["code", "chat", "something-else"])
def test_before_anything_is_seen_the_calibration_speaks(workload: str) -> None:
    model = AcceptanceModel()
    expected = expected_tokens_per_step(CALIBRATION, Method.EAGLE3, 3, workload, 0.0)
    assert expected > 1.3
    assert model.tokens_per_step(ARM, "e", _key(workload)) == pytest.approx(expected)
    assert model.seen(ARM, _key(workload)) == 0


def test_temperature_costs_acceptance_from_the_start() -> None:
    model = AcceptanceModel()
    assert model.tokens_per_step(ARM, "e", _key(temperature=1.2)) < model.tokens_per_step(ARM, "e", _key())


def test_a_baseline_gives_one_token_a_step_and_is_known_without_trying() -> None:
    model = _model({("baseline:0", "b", *_key()): _seen(1.0, 5)})
    assert model.tokens_per_step("baseline:0", "b", _key()) == 1.0
    assert model.seen("baseline:0", _key("never")) == math.inf


def test_a_template_is_learned_and_its_relatives_with_it_the_less_the_farther() -> None:
    model = _model(
        {
            (ARM, "e", *_key("code", "aaaa")): _seen(3.6, 200),
            **{(ARM, "e", *_key("code", f"t{n}")): _seen(3.0, 100) for n in range(6)},
            **{(ARM, "e", *_key("chat", f"u{n}")): _seen(1.7, 100) for n in range(6)},
        }
    )
    assert model.tokens_per_step(ARM, "e", _key("code", "aaaa")) == pytest.approx(3.6, rel=0.05)
    assert model.tokens_per_step(ARM, "e", _key("chat", "u3")) == pytest.approx(1.7, rel=0.05)
    new = model.tokens_per_step(ARM, "e", _key("code", "new"))
    assert 2.7 < new < 3.4  # as its workload has it
    assert model.tokens_per_step(ARM, "e", _key("chat", "new")) < 2.0
    assert model.seen(ARM, _key("code", "aaaa")) == 200
    assert model.seen(ARM, _key("code", "new")) == 0


def test_one_odd_answer_moves_little() -> None:
    before = AcceptanceModel().tokens_per_step(ARM, "e", _key("chat", "t"))
    after = _model({(ARM, "e", *_key("chat", "t")): _seen(4.0 * before, 1)}).tokens_per_step(
        ARM, "e", _key("chat", "u")
    )
    assert before < after < 3.2 * before


def test_arms_learn_for_themselves_but_backends_of_an_arm_from_each_other() -> None:
    unseen = AcceptanceModel()
    model = _model({(ARM, "e1", *_key("chat", "t")): _seen(3.5, 100)})
    assert model.tokens_per_step("suffix:24", "s", _key("chat", "t")) == unseen.tokens_per_step(
        "suffix:24", "s", _key("chat", "t")
    )
    own, other = (model.tokens_per_step(ARM, name, _key("chat", "t")) for name in ("e1", "e2"))
    assert own == pytest.approx(3.5, rel=0.05)
    assert other == pytest.approx(own, rel=0.15)


def test_a_step_never_gives_less_than_a_token() -> None:
    model = _model({("ngram:3", "n", *_key("chat", "t")): _seen(1.0, 500)})
    assert 1.0 <= model.tokens_per_step("ngram:3", "n", _key("chat", "t")) < 1.1


def test_recovers_what_templates_draw() -> None:
    """Noise as recorded between requests that are alike; 40 requests of each of 20 templates."""
    rng = np.random.default_rng(3)
    true = {f"t{number}": float(np.exp(rng.normal(0.8, 0.25))) for number in range(20)}
    seen: dict[Key, Sums] = {}
    for template, tokens in true.items():
        logs = np.maximum(0.0, math.log(tokens) + rng.normal(0, 0.25, 40))
        seen[(ARM, "e", *_key("chat", template))] = (40.0, float(logs.sum()), float((logs**2).sum()))
    model = _model(seen)
    off = [abs(math.log(model.tokens_per_step(ARM, "e", _key("chat", name)) / tokens)) for name, tokens in true.items()]
    assert np.mean(off) < 0.06


def test_a_key_that_is_one_too_many_loses_its_template_only() -> None:
    whole = (ARM, "e", *_key("code", "aaaa"))
    assert without_template(whole) == (ARM, "e", *_key("code", ""))
    assert without_template(_key("code", "aaaa"))[TEMPLATE] == ""
