"""Checks that every policy must pass, for use in the tests of your own.

from policies.checks import check_policy
check_policy("my_policy", {"my_setting": 3})
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from random import Random
from typing import Any

from backends.backend import Backend, EngineLoad
from backends.speculation import Method
from policies.build import build, predicted_s
from policies.decision import Decision, Outcome
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Policy, policies
from policies.roles import Informed, Learner, Maintained, assess, preview

REASON = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_METHODS = {Method.BASELINE: 0, Method.NGRAM: 5, Method.SUFFIX: 24, Method.EAGLE3: 3}
_ROUNDS = 150


def check_policy(name: str, settings: Mapping[str, Any] | None = None, seed: int = 0) -> None:
    """Check that a registered policy does what the gateway relies on, over random requests, pools and outcomes.

    Requests and reports take all values that the gateway lets through, including extremes. For all of them, the policy
    chooses a candidate, with a propensity in (0, 1] and a reason that can be a label. `preview` predicts the choice,
    and neither it nor `assess` changes later ones.

    Parameters
    ----------
    name
        Name of the policy.
    settings
        Its settings as in the pool file, without `name`.
    seed
        Seed of the requests, pools and outcomes; also the policy's, if it has the setting `seed`.

    Raises
    ------
    AssertionError
        If a check fails.
    """
    kind = policies()[name].Settings
    given = {**({"seed": seed} if "seed" in kind.model_fields else {}), **(settings or {})}
    asked, explained = (_play(build(name, kind.model_validate(given)), seed, explains) for explains in (False, True))
    if "seed" in kind.model_fields:
        assert asked == explained, "to explain decisions changed later ones"


def _play(policy: Policy, seed: int, explains: bool) -> list[Decision]:
    """Return the decisions of a policy for random requests; each is observed three requests later."""
    rng, now_s, decisions = Random(seed), 1_000_000.0, list[Decision]()
    backends = [Backend(method.value, "m", method, "http://a", k) for method, k in _METHODS.items()]
    requests = list[RequestFeatures]()
    if isinstance(policy, Maintained):
        policy.set_clock(lambda: now_s)
    for number in range(_ROUNDS):
        now_s += rng.choice((0.01, 1.0, 20.0))
        for backend in backends:
            backend.in_flight, backend.weight = _extreme(rng, 8, 10**5), rng.choice((0.0, 0.5, 1.0, 1e6))
            backend.load = _load(rng)
        pool, request = rng.sample(backends, rng.randint(1, len(backends))), _request(rng)
        if explains:
            expected = preview(policy, request, pool)
            for rated in (_request(Random(number)), request):
                ratings = assess(policy, rated, pool)
                assert [each.backend for each in ratings] == [backend.name for backend in pool]
                assert not any(each.score is not None and math.isnan(each.score) for each in ratings)
        decision = policy.choose(request, pool)
        if explains:
            assert decision == expected, f"chose {decision}, but foretold {expected}"
        assert decision.backend in {backend.name for backend in pool}, f"{decision.backend} is no candidate"
        assert 0.0 < decision.propensity <= 1.0 + 1e-9, f"the propensity is {decision.propensity}"
        assert (decision.policy, bool(REASON.fullmatch(decision.reason))) == (policy.name, True), decision
        predicted = predicted_s(decision)
        assert predicted is None or 0.0 < predicted < math.inf
        decisions.append(decision)
        requests.append(request)
        if isinstance(policy, Learner) and number >= 3:
            policy.observe(_outcome(rng, requests[number - 3], decisions[number - 3]))
        if isinstance(policy, Maintained) and number % 40 == 0 and (work := policy.maintenance()) is not None:
            work()
    if isinstance(policy, Informed):
        policy.forget(backends[0].name)
        assert policy.choose(_request(rng), backends).backend
    return decisions


def _extreme(rng: Random, usual: int, most: int) -> int:
    return rng.choice((0, rng.randint(0, usual), rng.randint(0, usual), most))


def _load(rng: Random) -> EngineLoad:
    others, at_s = _extreme(rng, 8, 10**6), rng.choice((0.0, 1e9))
    return EngineLoad(
        others, _extreme(rng, 3, 10**6), rng.random(), others, at_s, kv_tokens=_extreme(rng, 10**5, 2**53)
    )


def _request(rng: Random) -> RequestFeatures:
    blocks = tuple(rng.randint(0, 3) for _ in range(rng.randint(0, 4)))
    return RequestFeatures(
        "m",
        Endpoint.CHAT,
        n=rng.choice((1, 1, 1, 2**31 - 1)),
        temperature=rng.choice((0.0, 0.2, 1.0, 1e308)),
        prompt_tokens=_extreme(rng, 2000, 2**31),
        max_tokens=rng.choice((None, 0, 200, 2**31 - 1)),
        workload=rng.choice(("", "code")),
        template=rng.choice(("", "aa", "bb")),
        slo_ttft_s=rng.choice((None, 1e-6, 0.2, 1e6)),
        prefix=blocks,
        prefix_tokens=tuple(100 * (index + 1) for index in range(len(blocks))),
    )


def _outcome(rng: Random, request: RequestFeatures, decision: Decision) -> Outcome:
    tokens = _extreme(rng, 500, 2**30)
    return Outcome(
        request,
        decision,
        Method(decision.backend),
        status=rng.choice((200, 200, 200, 500)),
        ttft_s=rng.choice((None, 0.0, 0.05, 1e6)),
        tpot_s=rng.choice((None, 0.0, 0.01, 1e6)),
        e2e_s=rng.choice((0.0, 1.0, 1e6)),
        prompt_tokens=_extreme(rng, 2000, 2**30),
        output_tokens=tokens,
        tokens_per_step=rng.choice((None, 1.0, 2.5, 2.0**30)),
        drafted_tokens=rng.choice((None, 0, tokens)),
        accepted_tokens=rng.choice((None, 0, tokens // 2)),
        cached_tokens=rng.choice((None, 0, 2**30)),
    )
