"""Whatever is reported within its bounds, every policy chooses a candidate, and what it expects stays finite."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.backend import Backend, EngineLoad
from backends.speculation import Method
from policies.decision import Outcome
from policies.features.request import Endpoint, RequestFeatures
from policies.guarded.policy import build, predicted_s
from policies.policy import Policy, policies
from policies.roles import Learner, Maintained, assess, preview

NEEDED: dict[str, dict[str, Any]] = {"static": {"method": "ngram"}}
METHODS = {Method.BASELINE: 0, Method.NGRAM: 5, Method.SUFFIX: 24, Method.EAGLE3: 3}
LOADS = st.builds(
    EngineLoad,
    running=st.integers(0, 10**6),
    waiting=st.integers(0, 10**6),
    kv_usage=st.floats(0, 1),
    others=st.integers(0, 2 * 10**6),
    at_s=st.sampled_from((0.0, time.monotonic(), time.monotonic() + 1e6)),
    kv_tokens=st.integers(0, 2**53),
)
POOLS = st.lists(
    st.tuples(
        st.sampled_from(sorted(METHODS)),
        st.floats(0, 1e6),
        st.integers(0, 10**5),
        LOADS,
    ),
    min_size=1,
    max_size=4,
)
REQUESTS = st.builds(
    RequestFeatures,
    st.just("m"),
    st.just(Endpoint.CHAT),
    n=st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 1e308),
    prompt_tokens=st.integers(0, 2**31),
    max_tokens=st.none() | st.integers(0, 2**31 - 1),
    workload=st.sampled_from(("", "code")),
    template=st.sampled_from(("", "aa", "bb")),
    slo_ttft_s=st.none() | st.floats(1e-6, 1e6),
)
SECONDS = st.none() | st.floats(0, 1e6)
TOKENS = st.none() | st.integers(0, 2**30)
OUTCOMES = st.fixed_dictionaries(
    {
        "status": st.sampled_from((200, 200, 200, 500)),
        "ttft_s": SECONDS,
        "tpot_s": SECONDS,
        "e2e_s": st.floats(0, 1e6),
        "prompt_tokens": st.integers(0, 2**30),
        "output_tokens": st.integers(0, 2**30),
        "tokens_per_step": st.none() | st.floats(1.0, 2.0**30),
        "drafted_tokens": TOKENS,
        "accepted_tokens": TOKENS,
        "cached_tokens": TOKENS,
    }
)


def policy_of(name: str, *, guarded: bool) -> Policy:
    chosen = policies()[name]
    given = NEEDED.get(name, {})
    if guarded and "outlier_ejection" in chosen.Settings.model_fields:
        given = given | {"outlier_ejection": True, "guardrail": {"share": 0.5}}
    return build(name, chosen.Settings(**given))


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("name", sorted(policies()))
@settings(max_examples=25, deadline=None)
@given(pool=POOLS, requests=st.lists(st.tuples(REQUESTS, OUTCOMES), min_size=1, max_size=6))
def test_every_policy_is_total(
    name: str, guarded: bool, pool: list[Any], requests: list[tuple[RequestFeatures, dict[str, Any]]]
) -> None:
    policy = policy_of(name, guarded=guarded)
    backends = [
        Backend(f"b{number}", "m", method, "http://a", METHODS[method], weight=weight, in_flight=in_flight, load=load)
        for number, (method, weight, in_flight, load) in enumerate(pool)
    ]
    methods = {backend.name: backend.method for backend in backends}
    for request, outcome in requests:
        for decide in (preview, Policy.choose):
            decision = (
                policy.choose(request, backends) if decide is Policy.choose else preview(policy, request, backends)
            )
            assert decision.backend in methods
            assert 0.0 < decision.propensity <= 1.0 + 1e-9
            expected_s = predicted_s(decision)
            assert expected_s is None or 0.0 < expected_s < math.inf
        for each in assess(policy, request, backends):
            assert each.score is None or not math.isnan(each.score)
        if isinstance(policy, Learner):
            policy.observe(Outcome(request, decision, methods[decision.backend], **outcome))
        if isinstance(policy, Maintained) and (work := policy.maintenance()) is not None:
            work()
