"""Tokens per step: first from the calibration, then learned by workload and template."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.arm import arm_of
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.acceptance import AcceptanceModel
from policies.learned.models.keys import TEMPLATE, TURNS, Key, key_of, without_template
from policies.learned.models.prior import DEFAULT_CALIBRATION, expected_by_k
from policies.statistics import Sums

ARM = "eagle3:3"
CALIBRATION = DEFAULT_CALIBRATION


def _key(workload: str = "chat", template: str = "", temperature: float = 0.0) -> Key:
    return key_of(
        RequestFeatures(
            "m", Endpoint.CHAT, temperature=temperature, workload=workload, template=template, prompt_tokens=200
        )
    )


def _sums(tokens_per_step: float, count: int) -> Sums:
    log = math.log(tokens_per_step)
    return (float(count), count * log, count * log * log)


def _model(seen: dict[Key, Sums]) -> AcceptanceModel:
    return AcceptanceModel.fit(seen, CALIBRATION)


def test_thinking_is_learned_beside_everything_else() -> None:
    request = RequestFeatures("m", Endpoint.CHAT, temperature=0.0, workload="chat", prompt_tokens=200)
    keys = {said: key_of(replace(request, thinking=said)) for said in (None, True, False)}
    assert {key[:TURNS] for key in keys.values()} == {keys[None][:TURNS]}
    model = _model({(ARM, "e", *keys[True]): _sums(2.0, 300), (ARM, "e", *keys[False]): _sums(2.6, 300)})
    assert [model.tokens_per_step(ARM, "e", keys[said]) for said in (True, False)] == pytest.approx(
        [2.0, 2.6], rel=0.02
    )
    others = [key_of(replace(request, thinking=said, workload="code")) for said in (True, False)]
    code = [model.tokens_per_step(ARM, "e", key) for key in others]
    assert code[1] > 1.2 * code[0]  # also for work of which nothing was seen


def test_an_arm_is_a_method_with_its_depth() -> None:
    def arm(method: Method, k: int) -> str:
        return arm_of(Backend("a", "m", method, "http://x", num_speculative_tokens=k))

    assert arm(Method.EAGLE3, 3) == "eagle3:3"
    assert arm(Method.SUFFIX, 0) == "suffix:24"
    assert arm(Method.NGRAM, 0) == "ngram:3"
    assert arm(Method.BASELINE, 0) == arm(Method.BASELINE, 5) == "baseline:0"


@pytest.mark.parametrize("workload", ["code", "chat", "something-else"])
def test_without_observations_the_calibration_is_used(workload: str) -> None:
    model = AcceptanceModel()
    expected = math.exp(expected_by_k(CALIBRATION, Method.EAGLE3, 3, workload, 0.0)[-1])
    assert expected > 1.3
    assert model.tokens_per_step(ARM, "e", _key(workload)) == pytest.approx(expected)
    assert model.observations(ARM, _key(workload)) == 0


def test_temperature_lowers_acceptance_from_the_start() -> None:
    model = AcceptanceModel()
    assert model.tokens_per_step(ARM, "e", _key(temperature=1.2)) < model.tokens_per_step(ARM, "e", _key())


def test_a_baseline_yields_one_token_per_step_without_observations() -> None:
    model = _model({("baseline:0", "b", *_key()): _sums(1.0, 5)})
    assert model.tokens_per_step("baseline:0", "b", _key()) == 1.0
    assert model.observations("baseline:0", _key("never")) == math.inf


def test_a_template_is_learned_and_generalises_to_its_workload() -> None:
    model = _model(
        {
            (ARM, "e", *_key("code", "aaaa")): _sums(3.6, 200),
            **{(ARM, "e", *_key("code", f"t{n}")): _sums(3.0, 100) for n in range(6)},
            **{(ARM, "e", *_key("chat", f"u{n}")): _sums(1.7, 100) for n in range(6)},
        }
    )
    assert model.tokens_per_step(ARM, "e", _key("code", "aaaa")) == pytest.approx(3.6, rel=0.05)
    assert model.tokens_per_step(ARM, "e", _key("chat", "u3")) == pytest.approx(1.7, rel=0.05)
    new = model.tokens_per_step(ARM, "e", _key("code", "new"))
    assert 2.7 < new < 3.4  # like its workload
    assert model.tokens_per_step(ARM, "e", _key("chat", "new")) < 2.0
    assert model.observations(ARM, _key("code", "aaaa")) == 200
    assert model.observations(ARM, _key("code", "new")) == 0


def test_one_unusual_answer_has_little_effect() -> None:
    before = AcceptanceModel().tokens_per_step(ARM, "e", _key("chat", "t"))
    after = _model({(ARM, "e", *_key("chat", "t")): _sums(4.0 * before, 1)}).tokens_per_step(
        ARM, "e", _key("chat", "u")
    )
    assert before < after < 3.2 * before


def test_backends_of_an_arm_share_observations_but_arms_do_not() -> None:
    unseen = AcceptanceModel()
    model = _model({(ARM, "e1", *_key("chat", "t")): _sums(3.5, 100)})
    assert model.tokens_per_step("suffix:24", "s", _key("chat", "t")) == unseen.tokens_per_step(
        "suffix:24", "s", _key("chat", "t")
    )
    own, other = (model.tokens_per_step(ARM, name, _key("chat", "t")) for name in ("e1", "e2"))
    assert own == pytest.approx(3.5, rel=0.05)
    assert other == pytest.approx(own, rel=0.15)


def test_a_step_yields_at_least_one_token() -> None:
    model = _model({("ngram:3", "n", *_key("chat", "t")): _sums(1.0, 500)})
    assert 1.0 <= model.tokens_per_step("ngram:3", "n", _key("chat", "t")) < 1.1


def test_template_effects_are_recovered() -> None:
    """40 requests of each of 20 templates, with the noise recorded between similar requests."""
    rng = np.random.default_rng(3)
    true = {f"t{number}": float(np.exp(rng.normal(0.8, 0.25))) for number in range(20)}
    seen: dict[Key, Sums] = {}
    for template, tokens in true.items():
        logs = np.maximum(0.0, math.log(tokens) + rng.normal(0, 0.25, 40))
        seen[(ARM, "e", *_key("chat", template))] = (40.0, float(logs.sum()), float((logs**2).sum()))
    model = _model(seen)
    errors = [
        abs(math.log(model.tokens_per_step(ARM, "e", _key("chat", name)) / tokens)) for name, tokens in true.items()
    ]
    assert np.mean(errors) < 0.06


def test_merged_keys_lose_only_their_template() -> None:
    key = (ARM, "e", *_key("code", "aaaa"))
    assert without_template(key) == (ARM, "e", *_key("code", ""))
    assert without_template(_key("code", "aaaa"))[TEMPLATE] == ""
