from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from backends.backend import Backend
from backends.health import Health, State
from backends.speculation import Method
from backends.validation import issues_of
from policies.features.request import Endpoint, RequestFeatures, describe
from policies.rules.policy import Thresholds, ThresholdSettings
from policies.rules.rule import DEFAULT_RULES

RULES = """
spill: {slack: 4, ratio: 1.5}
seed: 1
rules:
  - {name: busy, when: {in_flight_per_backend: ">= 20"}, prefer: [baseline]}
  - {name: repeats-itself, when: {overlap: ">= 0.35", temperature: "<= 0.5"}, prefer: [suffix, ngram]}
  - {name: ours, when: {template: "0123abcd", workload: [code, agent]}, prefer: ["backend:own", eagle3]}
  - {name: tools, when: {tools: true, stream: false, max_tokens: "< 100"}, prefer: [ngram]}
  - {name: hot, when: {temperature: "> 0.8"}, prefer: [mtp]}
"""


def policy(text: str = RULES) -> Thresholds:
    return Thresholds(ThresholdSettings.model_validate(yaml.safe_load(text)))


def backend(name: str, in_flight: int = 0, weight: float = 1.0, method: str = "") -> Backend:
    kind = Method(method or name)
    return Backend(name, "m", kind, "http://127.0.0.1:1", weight=weight, health=Health(State.UP), in_flight=in_flight)


def pool(**in_flight: int) -> list[Backend]:
    return [backend(name, in_flight.get(name, 0)) for name in ("baseline", "ngram", "suffix", "eagle3", "draft_model")]


def features(**fields: Any) -> RequestFeatures:
    return RequestFeatures(**{"model": "m", "endpoint": Endpoint.CHAT, "temperature": 0.0, **fields})


def chosen(request: RequestFeatures, candidates: list[Backend], text: str = RULES) -> tuple[str, str]:
    decision = policy(text).choose(request, candidates)
    return decision.backend, decision.reason


def test_the_first_matching_rule_decides() -> None:
    assert chosen(features(overlap=0.4), pool()) == ("suffix", "repeats-itself")
    assert chosen(features(overlap=0.4, tools=True, max_tokens=5), pool()) == ("suffix", "repeats-itself")
    assert chosen(features(overlap=0.3, tools=True, max_tokens=5), pool()) == ("ngram", "tools")
    assert chosen(features(template="0123abcd", workload="agent"), [*pool(), backend("own", method="mtp")]) == (
        "own",
        "ours",
    )
    assert chosen(features(template="0123abcd", workload="agent"), pool()) == ("eagle3", "ours")


def test_all_conditions_of_a_rule_must_hold() -> None:
    assert policy().choose(features(overlap=0.4, temperature=0.6), pool()).reason == "no_rule"
    assert policy().choose(features(template="0123abcd", workload="chat"), pool()).reason == "no_rule"
    assert policy().choose(features(tools=True, stream=True, max_tokens=5), pool()).reason == "no_rule"


def test_a_request_without_a_limit_meets_no_condition_on_the_limit() -> None:
    assert policy().choose(features(tools=True, max_tokens=None), pool()).reason == "no_rule"


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "matches"),
    [(1827, None, False), (1828, None, True), (1828, 4096, True), (1947, 100, False), (1948, 100, True)],
)
def test_the_context_is_the_prompt_and_an_answer(prompt_tokens: int, max_tokens: int | None, matches: bool) -> None:
    rules = "rules: [{name: long, when: {context_tokens: '>= 2048'}, prefer: [suffix]}]"
    request = features(prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    assert (chosen(request, pool(), rules) == ("suffix", "long")) == matches


def test_the_least_loaded_backend_is_chosen_without_a_rule_or_target() -> None:
    loads = {"baseline": 3, "ngram": 2, "suffix": 1, "eagle3": 5, "draft_model": 4}
    assert chosen(features(), pool(**loads)) == ("suffix", "no_rule")
    assert chosen(features(temperature=1.0), pool(**loads)) == ("suffix", "none_preferred")


def test_an_overloaded_preferred_backend_is_skipped() -> None:
    request = features(overlap=0.4)
    assert chosen(request, pool(suffix=4)) == ("suffix", "repeats-itself")
    assert chosen(request, pool(suffix=5)) == ("ngram", "repeats-itself")
    assert chosen(request, pool(suffix=5, ngram=5, baseline=1, eagle3=1)) == ("draft_model", "spilled")
    level = dict.fromkeys(("baseline", "eagle3", "draft_model"), 10)
    assert chosen(request, pool(suffix=19, ngram=10, **level)) == ("suffix", "repeats-itself")
    assert chosen(request, pool(suffix=20, ngram=10, **level)) == ("ngram", "repeats-itself")


def test_a_rule_may_have_its_own_slack() -> None:
    text = RULES.replace("prefer: [suffix, ngram]}", "prefer: [suffix, ngram], slack: 0}")
    assert chosen(features(overlap=0.4), pool(), text) == ("suffix", "repeats-itself")
    assert chosen(features(overlap=0.4), pool(suffix=1), text) == ("ngram", "repeats-itself")


WEIGHTS = """
seed: 1
rules:
  - {name: code, when: {workload: code}, weights: {suffix: 1.0, eagle3: 0.8, baseline: 0.4}, slack: 4}
  - {name: own, when: {workload: own}, weights: {"backend:own": 2, mtp: 1}}
  - {name: gone, when: {workload: gone}, weights: {medusa: 1}}
"""


def by_weights(in_flight: dict[str, int]) -> tuple[str, str]:
    return chosen(features(workload="code"), pool(**in_flight), WEIGHTS)


def test_a_rule_with_weights_picks_the_lowest_load_per_weight() -> None:
    assert by_weights({}) == ("suffix", "code")
    assert by_weights({"suffix": 1}) == ("suffix", "code")  # (1 + 1 + 4) / 1 against (0 + 1 + 4) / 0.8
    assert by_weights({"suffix": 2}) == ("eagle3", "code")
    assert by_weights({"suffix": 7, "eagle3": 5}) == ("suffix", "code")
    assert by_weights({"suffix": 8, "eagle3": 5}) in {("baseline", "code"), ("eagle3", "code")}  # both have 12.5
    assert by_weights({"suffix": 8, "eagle3": 6}) == ("baseline", "code"), "n-gram has no weight, so it is never chosen"


def test_weights_may_name_backends_and_combine_with_backend_weights() -> None:
    candidates = [backend("own", 9, method="mtp"), backend("other", 0, weight=2, method="mtp"), backend("suffix", 0)]
    own = features(workload="own")
    assert chosen(own, candidates, WEIGHTS) == ("other", "own")  # (10 + 8) / 2 against (1 / 2 + 8) / 1
    candidates[0].in_flight = 7
    assert chosen(own, candidates, WEIGHTS) == ("own", "own")
    assert chosen(features(workload="gone"), candidates, WEIGHTS) == ("other", "none_preferred")
    assert policy(WEIGHTS).settings.named_backends() == {("rules", 1, "weights", "backend:own"): "own"}
    assert policy().settings.named_backends() == {("rules", 2, "prefer", 0): "own"}


def test_assessments_by_weight_show_how_the_score_is_computed() -> None:
    notes = {rating.backend: rating for rating in policy(WEIGHTS).assess(features(workload="code"), pool(eagle3=3))}
    assert notes["eagle3"].score == pytest.approx(10.0)
    assert notes["eagle3"].note == "rule 'code' (workload code): (4 requests with this one + slack 4) / weight 0.8"
    assert notes["ngram"].score is None
    assert notes["ngram"].note.endswith("does not name it")


def test_rules_round_trip_through_their_lines() -> None:
    for text in (RULES, WEIGHTS):
        settings = policy(text).settings
        lines = [line for rule in settings.rules for line in rule.lines()]
        written = ThresholdSettings.model_validate({"rules": yaml.safe_load("\n".join(lines))})
        assert written.rules == settings.rules


def test_the_load_limit_respects_backend_weights() -> None:
    candidates = [backend("suffix", 8, weight=2), backend("ngram", 0), backend("eagle3", 0)]
    assert chosen(features(overlap=0.4), candidates) == ("suffix", "repeats-itself")
    candidates[0].in_flight = 9
    assert chosen(features(overlap=0.4), candidates) == ("ngram", "repeats-itself")


def test_the_least_loaded_backend_of_a_method_is_chosen_with_random_ties() -> None:
    candidates = [backend(name, load, method="suffix") for name, load in (("a", 2), ("b", 1), ("c", 1))]
    decisions = [policy().choose(features(overlap=0.4), candidates)]
    assert decisions[0].propensity == 0.5
    thresholds = policy()
    drawn = Counter(thresholds.choose(features(overlap=0.4), candidates).backend for _ in range(400))
    assert set(drawn) == {"b", "c"}
    assert min(drawn.values()) > 150


def test_load_is_the_mean_over_the_candidates() -> None:
    assert chosen(features(overlap=0.4), pool(suffix=100)) == ("baseline", "busy")
    assert chosen(features(overlap=0.4), pool(suffix=99)) == ("ngram", "repeats-itself")
    assert chosen(features(), [backend("baseline", 24), backend("ngram", 16)]) == ("baseline", "busy")


def test_assessments_show_the_rule_its_conditions_and_skipped_backends() -> None:
    notes = {rating.backend: rating for rating in policy().assess(features(overlap=0.4), pool(suffix=5))}
    assert notes["ngram"].score == 2
    assert "rule 'repeats-itself' (temperature <= 0.5, overlap >= 0.35) names it at place 2" in notes["ngram"].note
    assert notes["suffix"].score is None
    assert "skipped: 5 requests are over the limit of 4" in notes["suffix"].note
    assert notes["eagle3"].note.endswith("does not name it")
    assert all("no rule matches" in rating.note for rating in policy().assess(features(), pool()))


MTP = {"name": "a", "prefer": ["mtp"]}


@pytest.mark.parametrize(
    ("rules", "path", "message", "hint"),
    [
        ([], "rules", "no rules", "write one"),
        ([{"name": "a", "prefer": []}], "rules.0.prefer", "names no target", "name a method"),
        ([{"name": "a", "prefer": ["eagel3"]}], "rules.0.prefer.0", "unknown method 'eagel3'", "mean 'eagle3'?"),
        ([{"name": "a", "prefer": ["backend:"]}], "rules.0.prefer.0", "names no backend", "backend:NAME"),
        ([{"name": "a", "prefer": ["mtp", "mtp"]}], "rules.0.prefer.1", "'mtp' is listed twice", "remove"),
        ([{"name": "a", "weights": {}}], "rules.0.weights", "names no target", "name a method"),
        ([{"name": "a", "weights": {"mtpp": 1}}], "rules.0.weights.mtpp", "unknown method", "'mtp'?"),
        ([{"name": "a", "weights": {"mtp": 0}}], "rules.0.weights.mtp", "must be greater than 0", ""),
        ([MTP | {"weights": {"mtp": 1}}], "rules.0.weights", "cannot be combined", "one of the two"),
        ([MTP | {"slack": -1}], "rules.0.slack", "greater than or equal to 0", ""),
        ([MTP | {"name": "spilled"}], "rules.0.name", "choose another name", ""),
        ([MTP | {"when": {"overlapp": "> 0"}}], "rules.0.when.overlapp", "unknown key", "did you mean 'overlap'?"),
        ([MTP, MTP | {"name": "b"}], "rules.1", "rule 'b' is never reached", "put it last"),
        ([MTP | {"when": {"n": 1}}, MTP], "rules.1.name", "two rules are called 'a'", "rename"),
    ],
)
def test_an_invalid_rule_is_reported_with_its_path_and_a_hint(
    rules: list[dict[str, Any]], path: str, message: str, hint: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        ThresholdSettings.model_validate({"rules": rules})
    (issue,) = issues_of(raised.value, ThresholdSettings)
    assert ".".join(map(str, issue.path)) == path
    assert message in issue.message
    assert hint in issue.hint


def test_the_json_schema_agrees_with_the_policy() -> None:
    schema = ThresholdSettings.model_json_schema()
    validator = Draft202012Validator(schema)
    settings = yaml.safe_load(RULES)
    validator.validate(settings)
    validator.validate(yaml.safe_load(WEIGHTS))
    validator.validate(yaml.safe_load(DEFAULT_RULES.read_text("utf-8")))
    invalid: tuple[dict[str, Any], ...] = (
        {},
        {"prefer": []},
        {"weights": {}},
        {"weights": {"mtp": 0}},
        {"prefer": ["mtp"], "weights": {"mtp": 1}},
    )
    for fields in invalid:
        assert not validator.is_valid({"rules": [{"name": "a", **fields}]}), fields
    assert not validator.is_valid({"rules": []})
    settings["rules"][0]["when"] = {"temperature": ">> 1"}
    assert not validator.is_valid(settings)
    settings["rules"][0]["when"] = {"temprature": "> 1"}
    assert not validator.is_valid(settings)


def described(text: str, **fields: Any) -> RequestFeatures:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    workload = fields.pop("workload", "")
    return describe(Endpoint.CHAT, body, model="m", default_temperature=1.0, qps=1.0, in_flight=1, workload=workload)


@pytest.mark.parametrize(
    ("request_", "method", "reason"),
    [
        (described("Tell me about Lisbon."), "eagle3", "default"),
        (described("Tell me about Lisbon.", temperature=None), "suffix", "hot"),
        (described("Tell me about Lisbon.", max_tokens=5), "ngram", "few-tokens"),
        (described("Tell me about Lisbon.", max_tokens=20000), "suffix", "long-answer"),
        (described("Tell me about Lisbon.", workload="agent"), "suffix", "declared-code"),
        (described("def f(x):\n    return x + 1\n", workload="chat"), "eagle3", "declared-chat"),
        (described("Tell me about Lisbon. " * 400, workload="chat"), "suffix", "long-context"),
        (described("def f(x):\n    y = x + 1\n    return y\n"), "suffix", "code"),
        (described("All work and no play makes Jack a dull boy. " * 9), "suffix", "repeats-itself"),
    ],
)
def test_the_default_rules_prefer_the_documented_methods(request_: RequestFeatures, method: str, reason: str) -> None:
    decision = Thresholds(ThresholdSettings()).choose(request_, pool())
    assert (decision.backend, decision.reason) == (method, reason)


def test_the_default_rules_avoid_speculation_in_a_saturated_pool() -> None:
    full = dict.fromkeys(("baseline", "ngram", "suffix", "eagle3", "draft_model"), 64)
    decision = Thresholds(ThresholdSettings()).choose(features(), pool(**full))
    assert (decision.backend, decision.reason) == ("baseline", "saturated")


def test_only_the_text_features_used_by_rules_are_computed() -> None:
    assert policy().text_features == {"overlap", "template"}
    assert policy("rules: [{name: all, prefer: [ngram]}]").text_features == set()
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a b c d " * 9}]}
    load = {"model": "m", "default_temperature": 1.0, "qps": 0.0, "in_flight": 0}
    full = describe(Endpoint.CHAT, body, **load)  # type: ignore[arg-type]
    partial = describe(Endpoint.CHAT, body, **load, text_features={"overlap"})  # type: ignore[arg-type]
    assert (partial.overlap, partial.template, partial.code_share) == (full.overlap, "", 0.0)
    assert full.template
    assert partial.prompt_tokens == full.prompt_tokens
