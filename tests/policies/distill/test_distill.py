"""Distilled rules: where they send requests, their text, and their gain."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
import yaml

from backends.backend import Backend
from backends.speculation import Method
from gateway.service.policy_versions import settings_of
from lab.options.policy import policy_reference
from policies.distill.distill import distill
from policies.distill.report import Distilled
from policies.features.request import Endpoint, RequestFeatures, describe
from policies.lean.thresholds import NothingLearnedError
from policies.learned.policy import Learned, LearnedSettings
from policies.learned.settings import Exploration
from policies.policy import Outcome
from policies.rules.policy import Thresholds, ThresholdSettings
from policies.trouble.troubles import TROUBLE, Finding
from tests.policies.distill.drawn_pool import pool, request

CODE = {"baseline": 1.0, "ngram": 4.0, "suffix": 4.6, "eagle3": 1.9}
LEVELS = (1.0, 6.0)
CHAT = {"baseline": 1.0, "ngram": 1.2, "suffix": 1.5, "eagle3": 2.7}


def train(policy: Learned, requests: int = 500) -> None:
    """Train a policy on requests whose temperature reveals their kind: code or chat."""
    now_s, rng, backends = 1e9, Random(0), pool()
    policy.set_clock(lambda: now_s)
    for _ in range(requests):
        code = rng.random() < 0.5
        features = request(temperature=0.0 if code else 0.7, prompt_tokens=rng.randint(40, 900))
        decision = policy.choose(features, backends)
        per_step = (CODE if code else CHAT)[decision.backend] * rng.lognormvariate(0.0, 0.1)
        tokens, step_s = int(rng.lognormvariate(5.0, 0.5)) + 8, 0.009
        tpot_s = step_s / max(1.0, per_step)
        now_s += 0.01
        method = Method(decision.backend)
        policy.observe(
            Outcome(
                features, decision, method, 200, 0.02, tpot_s, 0.02 + tpot_s * tokens, 100, tokens, max(1.0, per_step)
            )
        )


@pytest.fixture(scope="module")
def policy() -> Learned:
    trained = Learned(LearnedSettings(seed=0, exploration=Exploration(share=0.02)))
    train(trained)
    return trained


@pytest.fixture(scope="module")
def distilled(policy: Learned) -> Distilled:
    return distill(policy, pool(), levels=LEVELS)


def first_choice(settings: ThresholdSettings, features: RequestFeatures) -> str:
    return Thresholds(settings).choose(features, pool()).backend


def test_what_goes_wrong_is_kept_away_by_the_first_rules(policy: Learned) -> None:
    said = {"tries": 42.0, "bad": 7.0, "lost_s": 1.0, "arm": "eagle3:3", "problem": "failed"}
    shapes = [("thinking",), ("tools", "json_schema"), ("logprobs",)]  # of which no rule can speak
    policy.troubles.found = tuple(Finding(backend="", shape=shape, **said) for shape in shapes)  # type: ignore[arg-type]
    made = distill(policy, pool(), levels=LEVELS[:1])
    policy.troubles.found = ()
    thinking, tools, *_ = made.settings.rules
    assert thinking.when.conditions() == {"thinking": True}
    assert tools.when.conditions() == {"tools": True, "structured": True}
    assert thinking.prefer == tools.prefer == tuple(f"backend:{each.name}" for each in pool() if each.name != "eagle3")
    assert "# eagle3:3: 17% of 42 requests with thinking failed" in made.text
    assert yaml.safe_load(made.text)["rules"][0]["prefer"] == list(thinking.prefer)


def test_the_rules_prefer_the_fastest_method_for_each_kind(distilled: Distilled) -> None:
    code, chat = request(temperature=0.0, prompt_tokens=300), request(temperature=0.7, prompt_tokens=300)
    assert first_choice(distilled.settings, code) in ("suffix", "ngram")
    assert first_choice(distilled.settings, chat) == "eagle3"
    assert 2 <= len(distilled.leaves) <= 12
    assert sum(leaf.share for leaf in distilled.leaves) == pytest.approx(1.0)


def test_under_load_the_rules_use_every_backend_and_mostly_the_best(distilled: Distilled) -> None:
    rules, backends = Thresholds(distilled.settings), pool()
    for _ in range(400):
        name = rules.choose(request(temperature=0.7, prompt_tokens=300), backends).backend
        next(backend for backend in backends if backend.name == name).in_flight += 1
    loads = {backend.name: backend.in_flight for backend in backends}
    assert max(loads, key=loads.__getitem__) == "eagle3"
    assert min(loads.values()) > 30


def test_the_rules_keep_most_of_the_gain_and_beat_the_default_rules(distilled: Distilled) -> None:
    assert 0.1 < distilled.learned_gain < 1.0
    assert distilled.kept_share is not None
    assert distilled.kept_share > 0.9
    assert distilled.rules_gain > distilled.default_gain


def test_the_text_parses_to_the_same_rules(distilled: Distilled, tmp_path: Path) -> None:
    assert settings_of(distilled.text) == distilled.settings
    path = tmp_path / "rules.yaml"
    path.write_text(distilled.text)
    assert policy_reference(str(path), None).settings == distilled.settings
    assert f"{distilled.kept_share:.0%} of that gain" in distilled.text
    gains = distilled.learned_gain, distilled.rules_gain, distilled.default_gain
    assert re.findall(r"[+-][\d.]+%", distilled.text) == [f"{-gain:+.1%}" for gain in gains], "less time is less"


def test_single_prompts_earn_no_rule_and_one_kind_of_request_gets_one_rule() -> None:
    policy, backends, now_s = Learned(LearnedSettings(seed=0)), pool(), 1e9
    policy.set_clock(lambda: now_s)
    for number in range(60):
        body = {
            "messages": [{"role": "user", "content": f"Question {number % 12}: " + "why is that? " * (number % 12)}]
        }
        features = describe(Endpoint.CHAT, body, model="m", default_temperature=0.0, qps=0.0, in_flight=0)
        decision = policy.choose(features, backends)
        per_step = CHAT[decision.backend] * (1.0 + 0.02 * (number % 12))
        now_s += 0.1
        method = Method(decision.backend)
        policy.observe(Outcome(features, decision, method, 200, 0.02, 0.009 / per_step, 1.0, 20, 110, per_step))
    distilled = distill(policy, backends, levels=LEVELS)
    (rule,) = distilled.settings.rules
    assert (rule.name, rule.when.conditions()) == ("default", {})
    assert max(rule.weights, key=rule.weights.__getitem__) == "eagle3"
    assert "# No condition on requests earned a rule" in distilled.text
    assert settings_of(distilled.text) == distilled.settings


def test_distilling_is_deterministic_and_has_no_side_effects(policy: Learned, distilled: Distilled) -> None:
    before = dict(policy.predictor.backend_models)
    assert distill(policy, pool(), levels=LEVELS).text == distilled.text
    assert policy.predictor.backend_models == before


def test_distilling_needs_observations_and_two_backends(policy: Learned) -> None:
    with pytest.raises(NothingLearnedError, match="no request was observed"):
        distill(Learned(LearnedSettings()), pool())
    with pytest.raises(NothingLearnedError, match="two backends"):
        distill(policy, pool()[:1])


def test_different_arms_of_a_method_get_weights_by_backend_name(policy: Learned) -> None:
    backends = [*pool(), Backend("eagle-5", "m", Method.EAGLE3, "http://127.0.0.1:9", num_speculative_tokens=5)]
    for rule in distill(policy, backends, levels=(2.0,)).settings.rules:
        assert set(rule.weights) == {"baseline", "ngram", "suffix", "backend:eagle3", "backend:eagle-5"}


def test_pinned_rules_decide_while_the_policy_continues_to_learn(distilled: Distilled) -> None:
    policy = Learned(LearnedSettings(seed=0))
    policy.pinned = Thresholds(distilled.settings)
    decision = policy.choose(request(temperature=0.7, prompt_tokens=300), pool())
    assert (decision.policy, decision.backend) == ("thresholds", "eagle3")
    assert policy.preview(request(temperature=0.7), pool()).policy == "thresholds"
    assert policy.assess(request(temperature=0.7), pool())[0].note.startswith("rule")
    train(policy, 50)
    tables = policy.statistics.tables.items()
    assert [name for name, table in tables if not policy.statistics.buckets(table)] == [TROUBLE.name]
    assert np.isnan(policy.guardrail.ratio), "pinned rules are not part of the comparison"
