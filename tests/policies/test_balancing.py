from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from backends.backend import Backend, EngineChange, EngineLoad
from backends.health import Health, State
from backends.speculation import Method
from policies.balancing.least_loaded import LeastLoaded
from policies.balancing.lmetric import LMetric
from policies.balancing.power_of_two import PowerOfTwo
from policies.balancing.random import RandomChoice, RandomSettings
from policies.balancing.round_robin import RoundRobin
from policies.balancing.static import Static, StaticSettings
from policies.decision import Outcome
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.load import LoadMeter
from policies.load_policy import LoadSettings
from policies.policy import Policy, PolicySettings

REQUEST = RequestFeatures(model="m", endpoint=Endpoint.CHAT)


def backend(name: str, in_flight: int = 0, weight: float = 1.0, method: Method = Method.NGRAM) -> Backend:
    return Backend(name, "m", method, "http://127.0.0.1:1", weight=weight, health=Health(State.UP), in_flight=in_flight)


def names(policy: Policy, candidates: Sequence[Backend], times: int) -> list[str]:
    return [policy.choose(REQUEST, candidates).backend for _ in range(times)]


def test_round_robin_spreads_the_turns_of_a_heavy_backend() -> None:
    candidates = [backend("a", weight=3), backend("b"), backend("c")]
    turns = names(RoundRobin(PolicySettings()), candidates, 50)
    assert Counter(turns) == {"a": 30, "b": 10, "c": 10}
    assert not any(set(three) == {"a"} for three in zip(turns, turns[1:], turns[2:], strict=False))


def test_round_robin_continues_when_a_backend_leaves_and_returns() -> None:
    policy = RoundRobin(PolicySettings())
    a, b, c = backend("a"), backend("b"), backend("c")
    names(policy, [a, b, c], 4)
    without = Counter(names(policy, [a, c], 100))
    assert set(without) == {"a", "c"}
    assert abs(without["a"] - 50) <= 1
    back = Counter(names(policy, [a, b, c], 99))
    assert all(abs(turns - 33) <= 1 for turns in (back["a"], back["b"], back["c"]))


def test_least_loaded_divides_by_weight() -> None:
    policy = LeastLoaded(LoadSettings(seed=1))
    assert names(policy, [backend("a", 3), backend("b", 5, weight=2)], 1) == ["b"]
    assert names(policy, [backend("a", 2), backend("b", 6, weight=2)], 1) == ["a"]
    decision = policy.choose(REQUEST, [backend("a", 1), backend("b", 0)])
    assert (decision.backend, decision.policy, decision.reason) == ("b", "least_loaded", "fewest_in_flight")
    assert decision.propensity == 1.0


@pytest.mark.parametrize("kind", [LeastLoaded, PowerOfTwo, LMetric])
def test_ties_are_broken_evenly_with_correct_propensities(kind: type[LeastLoaded | PowerOfTwo | LMetric]) -> None:
    policy, candidates = kind(LoadSettings(seed=1)), [backend("a"), backend("b"), backend("d")]
    if kind is LeastLoaded:
        candidates.append(backend("c", 1))
    decisions = [policy.choose(REQUEST, candidates) for _ in range(1000)]
    assert [decision.propensity for decision in decisions] == pytest.approx([1 / 3] * 1000)
    drawn = Counter(decision.backend for decision in decisions)
    assert set(drawn) == {"a", "b", "d"}
    assert min(drawn.values()) > 270


def test_a_weight_of_zero_is_the_last_resort() -> None:
    policy = LeastLoaded(LoadSettings(seed=1))
    assert names(policy, [backend("a", weight=0), backend("b", 500)], 1) == ["b"]
    assert names(policy, [backend("a", weight=0)], 1) == ["a"]
    assert names(RoundRobin(PolicySettings()), [backend("a", weight=0), backend("b")], 4) == ["b"] * 4
    assert set(names(RoundRobin(PolicySettings()), [backend("a", weight=0), backend("b", weight=0)], 4)) == {"a", "b"}


def test_power_of_two_never_picks_the_most_loaded() -> None:
    policy = PowerOfTwo(LoadSettings(seed=1))
    candidates = [backend("a", 1), backend("b", 2), backend("c", 3)]
    decisions = [policy.choose(REQUEST, candidates) for _ in range(3000)]
    drawn = Counter(decision.backend for decision in decisions)
    propensities = {decision.backend: decision.propensity for decision in decisions}
    assert propensities == {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}
    assert drawn["a"] / 3000 == pytest.approx(2 / 3, abs=0.04)
    assert policy.choose(REQUEST, candidates[:1]).propensity == 1.0


def test_random_draws_by_weight() -> None:
    policy = RandomChoice(RandomSettings(seed=1))
    decisions = [policy.choose(REQUEST, [backend("a", weight=3), backend("b")]) for _ in range(3000)]
    drawn = Counter(decision.backend for decision in decisions)
    assert drawn["a"] / 3000 == pytest.approx(3 / 4, abs=0.03)
    assert {(decision.backend, decision.propensity) for decision in decisions} == {("a", 0.75), ("b", 0.25)}


def test_static_picks_its_backend_and_reports_when_it_cannot() -> None:
    policy = Static(StaticSettings(backend="b", seed=1))
    candidates = [backend("a", 5), backend("b", 9), backend("c", 4)]
    decision = policy.choose(REQUEST, candidates)
    assert (decision.backend, decision.reason) == ("b", "configured")
    fallback = policy.choose(REQUEST, [candidates[0], candidates[2]])
    assert (fallback.backend, fallback.reason) == ("c", "configured_unavailable")
    notes = [rating.note.split(";")[0] for rating in policy.assess(REQUEST, candidates)]
    assert notes == ["not configured", "configured", "not configured"]
    assert StaticSettings(backend="b").named_backends() == {("backend",): "b"}


def test_static_picks_the_least_loaded_backend_of_a_method() -> None:
    policy = Static(StaticSettings(method=Method.SUFFIX))
    candidates = [backend("a"), backend("b", 9, method=Method.SUFFIX), backend("c", 4, method=Method.SUFFIX)]
    assert policy.choose(REQUEST, candidates).backend == "c"


@pytest.mark.parametrize("settings", [{}, {"backend": "a", "method": "ngram"}])
def test_static_takes_exactly_one_of_backend_and_method(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="either `backend: NAME` or `method: METHOD`"):
        StaticSettings.model_validate(settings)


def test_own_requests_count_at_once_and_others_as_reported() -> None:
    meter = LoadMeter(clock=lambda: 100.0)
    a = backend("a", in_flight=5)
    a.load = EngineLoad(running=8, waiting=4, others=7, at_s=99.0)
    assert meter.counts([a]) == [12]
    a.in_flight = 8
    assert meter.counts([a]) == [15]
    a.load = EngineLoad(running=2, at_s=99.5)
    assert meter.counts([a]) == [8]


def test_a_stale_or_missing_report_is_ignored() -> None:
    now_s = 100.0
    meter = LoadMeter(stale_after_s=10.0, clock=lambda: now_s)
    a = backend("a", in_flight=2)
    assert meter.counts([a]) == [2]
    a.load = EngineLoad(running=50, others=48, at_s=95.0)
    assert meter.counts([a]) == [50]
    now_s = 105.1
    assert meter.counts([a]) == [2]


def prompt(*blocks: int) -> RequestFeatures:
    lengths = tuple(100 * (number + 1) for number in range(len(blocks)))
    return RequestFeatures("m", Endpoint.CHAT, prompt_tokens=1000, prefix=blocks, prefix_tokens=lengths)


def test_lmetric_multiplies_prompt_tokens_to_compute_and_batch_size() -> None:
    policy = LMetric(LoadSettings(seed=1))
    a, b = backend("a"), backend("b")
    policy.choose(prompt(1, 2, 3, 4, 5, 6), [a])  # 600 of 1,000 tokens
    for in_flight, chosen in ((0, "a"), (1, "a"), (2, "b"), (5, "b")):
        a.in_flight = in_flight
        assert policy.preview(prompt(1, 2, 3, 4, 5, 6, 7), [a, b]).backend == chosen  # 400 (n + 1) against 1,000
    scores = {rating.backend: rating.score for rating in policy.assess(prompt(1, 2, 3, 4, 5, 6, 7), [a, b])}
    assert scores == {"a": 400.0 * 6, "b": 1000.0}


def test_lmetric_trusts_the_reports_of_engines_and_forgets_who_leaves() -> None:
    policy = LMetric(LoadSettings(seed=1))
    a, b = backend("a"), backend("b", in_flight=1)
    request = prompt(1, 2, 3, 4, 5, 6, 7, 8, 9)
    for _ in range(100):
        decision = policy.choose(request, [a])
        policy.observe(Outcome(request, decision, a.method, 200, 0.1, 0.01, 1.0, 1000, 9, None, cached_tokens=0))
    assert policy.assess(request, [a])[0].score == pytest.approx(1000, rel=0.03)
    policy.choose(request, [b])
    assert policy.preview(request, [a, b]).backend == "b"  # 100 x 2 against about 1,000
    policy.forget("b")
    assert policy.preview(request, [a, b]).backend == "a"


@pytest.mark.parametrize("change", [EngineChange.RESTART, EngineChange.WAKE_UP, EngineChange.RELOAD])
@pytest.mark.parametrize("policy", [LMetric(LoadSettings(seed=1)), Learned(LearnedSettings())])
def test_what_an_engine_had_cached_is_gone_when_it_restarts(policy: LMetric | Learned, change: EngineChange) -> None:
    a, b, request = backend("a"), backend("b"), prompt(1, 2, 3, 4, 5, 6, 7, 8, 9)
    for one in (a, b):
        policy.choose(request, [one])
    cold = policy.assess(prompt(11), [a])[0]
    policy.engine_changed("a", change)
    restarted, other = policy.assess(request, [a, b])
    assert restarted.score is not None
    assert other.score is not None
    assert restarted.score == cold.score
    assert other.score < cold.score
    policy.sent_elsewhere("a", request.prefix, request.prefix_tokens)
    assert policy.assess(request, [a])[0].score == other.score


@pytest.mark.parametrize("policy", [LMetric(LoadSettings(seed=1)), Learned(LearnedSettings())])
def test_what_an_engine_had_cached_is_gone_when_it_evicts_it(policy: LMetric | Learned) -> None:
    a, request = backend("a"), prompt(1, 2, 3, 4, 5, 6, 7, 8, 9)
    policy.choose(request, [a])
    policy.evicted("a", 60.0, is_full=True)
    assert policy.choose(request, [a]).cached_tokens > 800
    policy.evicted("a", 0.0, is_full=True)
    decision = policy.choose(request, [a])
    assert (decision.cached_tokens, decision.cached_by) == (0, "events")
