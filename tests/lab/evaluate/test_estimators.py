"""Off-policy estimates against known truths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random

import numpy as np
import pytest

from backends.draft_schedule import DraftSchedule
from backends.speculation import Method
from benchmarks.routing import offpolicy as simulated
from lab.evaluate.estimators import Evaluation, evaluate
from lab.evaluate.log import LoggedCandidate, features_of, propensities, read_log
from lab.trace import TraceCandidate, TraceRecord
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Policy, policies
from policies.roles import Clocked

POOL = simulated.pool()


def build(name: str, **settings: object) -> Policy:
    entry = policies()[name]
    return entry(entry.Settings.model_validate(settings))


def _with(candidates: Sequence[TraceCandidate], **changes: float | None) -> list[TraceCandidate]:
    fields = ("backend", "method", "prediction_s", "propensity", "in_flight")
    return [TraceCandidate(**{name: getattr(one, name) for name in fields} | changes) for one in candidates]


def _one(records: list[TraceRecord], policy: Policy) -> Evaluation:
    (evaluation,) = evaluate(read_log(records, {"p": policy}), metrics=("e2e_s",))
    return evaluation


@pytest.mark.slow
def test_estimates_cover_the_truth_of_a_known_surface() -> None:
    """With fixed seeds, at most 2 of 8 intervals miss the truth, and the mean error is within its standard error."""
    truth = simulated.surface_truth("head", 20_000)
    seen = [simulated.evaluation_of("surface", 800, 1.0, "head", seed) for seed in range(8)]
    assert not any(found.refusal for found in seen)
    for name in ("ips", "snips", "dr"):
        means = [found.metrics["e2e_s"].estimates[name].mean for found in seen]
        assert sum(mean.low <= truth <= mean.high for mean in means) >= 6, name
        values = np.array([mean.value for mean in means])
        assert abs(values.mean() - truth) < 3.5 * values.std(ddof=1) / 8**0.5, name
    widths = [[found.metrics["e2e_s"].estimates[name].mean for found in seen] for name in ("ips", "snips", "dr")]
    ips, snips, dr = (float(np.median([one.high - one.low for one in kind])) for kind in widths)
    assert dr < snips < ips  # thanks to the model


@pytest.mark.slow
def test_estimates_cover_the_truth_of_simulated_replicas() -> None:
    records = simulated.replicas_log(8, 2000, 0.5)
    truth = simulated.replicas_truth("thresholds", count=4000)
    found = _one(records, simulated.build("thresholds"))
    assert not found.refusal
    estimates = found.metrics["e2e_s"].estimates
    for name in ("ips", "snips", "dr"):
        assert estimates[name].mean.low <= truth <= estimates[name].mean.high
    gain = truth / float(np.mean([record.e2e_s for record in records]))
    assert estimates["dr"].to_log.low <= gain <= estimates["dr"].to_log.high
    assert estimates["dr"].to_log.high < 1  # significantly better than the log


def test_the_policy_of_the_log_is_estimated_as_logged() -> None:
    records = list(simulated.surface_log(3, 800, 1.0))
    found = _one(records, build("random"))
    assert found.effective_sample_size == pytest.approx(800)
    assert found.mean_weight == pytest.approx(1.0)
    for estimate in found.metrics["e2e_s"].estimates.values():
        assert estimate.to_log.value == pytest.approx(1.0, abs=0.03)
    quantiles = found.metrics["e2e_s"].quantiles
    times = np.array([record.e2e_s for record in records])
    assert quantiles[0.5].value == pytest.approx(float(np.quantile(times, 0.5)), rel=0.02)
    assert 0.99 not in quantiles  # eight requests lie beyond it


def test_a_policy_whose_choices_were_never_logged_is_refused() -> None:
    records = list(simulated.surface_log(3, 800, 0.0))
    found = _one(records, build("static", backend="tree"))
    assert "the log's policy would never make 100% of its choices" in found.refusal
    assert "`tree` (100% of its choices, 0% of the log's)" in found.refusal
    assert "random" in found.refusal
    assert not found.metrics


def test_a_log_with_only_the_propensity_of_the_choice_is_refused_too() -> None:
    """`least_loaded` records only the propensity of its choice; 1 leaves none for the others."""
    records = [
        replace(record, candidates=_with(record.candidates, propensity=None))
        for record in simulated.surface_log(3, 800, 0.0)
    ]
    assert "would never make" in _one(records, build("random")).refusal


def test_a_log_with_too_little_exploration_is_refused_with_the_needed_size() -> None:
    found = _one(list(simulated.surface_log(3, 800, 0.1)), build("static", backend="tree"))
    assert found.effective_sample_size < 100
    needed = round(800 * 100 / found.effective_sample_size)
    assert f"Log about {needed:,} such requests" in found.refusal


def test_wrong_propensities_are_detected() -> None:
    records = [replace(record, propensity=0.5) for record in simulated.surface_log(3, 3000, 1.0)]
    found = _one(records, build("static", backend="head"))
    assert found.mean_weight == pytest.approx(0.5, abs=0.05)
    assert "the mean weight is 0.5" in found.refusal


def test_a_policy_that_shifts_the_load_gets_a_note() -> None:
    records = [
        replace(record, candidates=_with(record.candidates, in_flight=6))
        for record in simulated.surface_log(3, 800, 1.0)
    ]
    (note,) = [note for note in _one(records, build("static", backend="head")).notes if "replay" in note]
    assert "`head` 100% instead of " in note
    assert "6.0 requests in flight" in note


@pytest.mark.slow
def test_missing_features_and_loads_get_a_note() -> None:
    records = list(simulated.surface_log(3, 800, 1.0))
    assert any("code_share, overlap" in note for note in _one(records, build("thresholds", seed=1)).notes)
    complete = [replace(record, overlap=0.1, code_share=0.0) for record in records]
    assert not any("overlap" in note for note in _one(complete, build("thresholds", seed=1)).notes)
    idle = [replace(record, candidates=_with(record.candidates, in_flight=None)) for record in records]
    assert any("lacks the load" in note for note in _one(idle, build("random")).notes)


def test_unusable_records_are_left_out_and_counted() -> None:
    good = list(simulated.surface_log(3, 400, 1.0))
    bad = [
        replace(good[0], error="timeout"),
        replace(good[1], status=503),
        replace(good[2], candidates=()),
        replace(good[3], propensity=None),
        replace(good[4], e2e_s=None),
        replace(good[5], retried_from="plain"),
        replace(good[6], rescued_from="plain", rescued_at=7),
    ]
    log = read_log([*good, *bad], {"p": build("random")})
    assert log.requests == 400
    assert log.left_out == {
        "failed": 2,
        "were completed by another backend": 1,
        "have no choice among candidates": 1,
        "have no propensity": 1,
        "have no end time": 1,
        "were retried after a failure": 1,
    }
    assert any(
        "4 requests that failed, were retried or were rescued" in note for note in evaluate(log, metrics=())[0].notes
    )
    with pytest.raises(ValueError, match=r"no record of the log has .*: 2 failed; 1 have no choice"):
        read_log(bad, {"p": build("random")})
    with pytest.raises(ValueError, match="it is empty"):
        read_log([], {"p": build("random")})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("random", {}),
        ("least_loaded", {}),
        ("power_of_two", {}),
        ("static", {"method": "ngram"}),
        ("thresholds", {}),
        ("learned", {}),
    ],
)
def test_propensities_match_the_frequencies_of_choices(name: str, settings: dict[str, object]) -> None:
    candidates = [replace(one, in_flight=requests) for one, requests in zip(POOL, (2, 1, 1, 3), strict=True)]
    request = RequestFeatures("m", Endpoint.CHAT, prompt_tokens=100, temperature=0.0)
    policy = build(name, seed=1, **settings)
    policy.explain_candidates = True
    shares = propensities(policy, request, candidates)
    assert sum(shares) == pytest.approx(1.0)
    draws = 4000
    fresh = build(name, seed=2, **settings)
    if isinstance(fresh, Clocked):
        fresh.set_clock(count(step=10.0).__next__)  # so that each prompt has been computed when the next one comes
    counted = Counter(fresh.choose(request, candidates).backend for _ in range(draws))
    for share, candidate in zip(shares, candidates, strict=True):
        assert counted[candidate.name] / draws == pytest.approx(share, abs=4 * 0.5 / draws**0.5)


def test_round_robin_is_asked_once_for_each_request() -> None:
    policy = build("round_robin")
    request = RequestFeatures("m", Endpoint.CHAT)
    turns = [propensities(policy, request, POOL).index(1.0) for _ in range(8)]
    assert turns == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_logged_request_has_the_features_that_the_policy_saw() -> None:
    known = RequestFeatures(
        "m", Endpoint.COMPLETIONS, stream=True, n=2, temperature=0.3, top_p=0.9, overlap=0.5, code_share=0.2,
        prompt_tokens=77, max_tokens=50, template="0a1b2c3d", turns=3, structured=True, tools=True,
        baseline_only=("min_p",), qps=2.5, in_flight=4, workload="code",
    )  # fmt: skip
    names = [name for name in TraceRecord.__dataclass_fields__ if name in RequestFeatures.__dataclass_fields__]
    record = TraceRecord(**{name: getattr(known, name) for name in names})
    assert features_of(record) == known


def test_candidates_have_settings_from_the_pool_and_load_from_the_log() -> None:
    seen: list[LoggedCandidate] = []

    class Watching(type(build("random"))):  # type: ignore[misc]
        def choose(self, request, candidates):  # type: ignore[no-untyped-def]
            seen.extend(candidates)
            return super().choose(request, candidates)

    policy = Watching(policies()["random"].Settings.model_validate({"seed": 1}))
    record = TraceRecord(
        backend="a", propensity=0.5, status=200, e2e_s=1.0,
        candidates=[TraceCandidate("a", "eagle3", in_flight=3, running=5, waiting=1), TraceCandidate("b", "mtp")],
    )  # fmt: skip
    read_log([record], {"p": policy}, {"b": LoggedCandidate("b", Method.MTP, DraftSchedule(2), 3.0)})
    a, b = (next(one for one in seen if one.name == name) for name in "ab")
    assert (a.method, a.in_flight, a.load.running, a.load.waiting) == (Method.EAGLE3, 3, 5, 1)
    assert (b.method, b.num_speculative_tokens, b.weight, b.in_flight) == (Method.MTP, 2, 3.0, 0)


def test_the_same_seed_gives_the_same_evaluation() -> None:
    records = list(simulated.surface_log(Random(1).randrange(99), 600, 1.0))
    first, second = (_one(records, build("thresholds", seed=1)) for _ in range(2))
    assert first == second
