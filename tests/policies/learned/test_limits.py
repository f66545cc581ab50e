"""Requests beyond a drafter's limit: what they cost, where they gather, and that they accuse nobody."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from backends.backend import Backend, EngineLoad
from backends.drafter_limit import Beyond, DrafterLimit
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.cost import Delay
from policies.learned.policy import Learned
from policies.learned.replica import STEPS
from policies.learned.settings import LearnedSettings
from policies.learned.table import PER_STEP
from policies.learned.undrafted import Reach, steps_of
from policies.policy import GuardrailSettings, Outcome

LIMIT = DrafterLimit(2048)
SHORT = RequestFeatures("m", Endpoint.CHAT, temperature=0.0, workload="chat", prompt_tokens=300, max_tokens=500)
LONG = replace(SHORT, prompt_tokens=4000)


def _backend(name: str, limit: DrafterLimit | None = LIMIT, **others: Any) -> Backend:
    return Backend(name, "m", Method.EAGLE3, "", num_speculative_tokens=3, drafter_limit=limit, **others)


class _Pool:
    """Backends under `learned`, and requests that run on them until they are ended."""

    def __init__(self, *backends: Backend) -> None:
        self.backends = {one.name: one for one in backends}
        self.now_s = 0.0
        self.policy = Learned(LearnedSettings(seed=1, guardrail=GuardrailSettings(share=0)))
        self.policy.set_clock(lambda: self.now_s)

    def send(self, request: RequestFeatures, *names: str) -> Outcome:
        """Send a request; return the outcome that it will have."""
        decision = self.policy.choose(request, [self.backends[name] for name in names or self.backends])
        self.backends[decision.backend].in_flight += 1
        return Outcome(request, decision, Method.EAGLE3, 200, 0.1, 0.004, self.now_s, request.prompt_tokens, 200, 2.4)

    def end(self, outcome: Outcome, per_step: float) -> None:
        """End a request."""
        self.backends[outcome.decision.backend].in_flight -= 1
        e2e_s = self.now_s - outcome.e2e_s
        self.policy.observe(replace(outcome, e2e_s=e2e_s, tokens_per_step=per_step, tpot_s=0.01 / per_step))

    def answer(self, per_step: float, times: int) -> None:
        """Send short requests of a second to `e`, one after the other."""
        for _ in range(times):
            one = self.send(SHORT, "e")
            self.now_s += 1.0
            self.end(one, per_step)

    def fit(self) -> None:
        if (work := self.policy.maintenance()) is not None:
            work()

    def learned(self) -> float:
        """Return how many answers of drafters, and of steps, have taught something."""
        rows = [*self.policy.statistics.buckets(PER_STEP).items(), *self.policy.statistics.buckets(STEPS).items()]
        return sum(sums[0] for key, sums in rows if key[0])


def _predict(request: RequestFeatures, backend: Backend) -> Delay:
    return _Pool(backend).policy._delays(request, [backend])[0]


@pytest.mark.parametrize("kind", list(Beyond))
def test_a_limit_costs_what_it_says(kind: Beyond) -> None:
    """Those beyond it lose their drafts, and those beside them theirs."""

    def predict(request: RequestFeatures, limit: DrafterLimit | None) -> tuple[float, float, float]:
        one = _predict(request, _backend("e", limit, in_flight=8))
        return one.ttft_s, one.steps, one.others_s

    assert predict(SHORT, DrafterLimit(2048, kind)) == predict(SHORT, None)
    (ttft_s, steps, others_s), free = predict(LONG, DrafterLimit(2048, kind)), predict(LONG, None)
    loses, harms = kind is not Beyond.WORSE, kind in (Beyond.BATCH, Beyond.CRASH)
    assert ttft_s == free[0]
    assert (steps > 1.2 * free[1]) == loses
    assert (others_s > 2.0 * free[2]) == harms


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "undrafted", "room"),
    [
        (300, None, 0.0, 1745.0),  # unlikely to get beyond 2,048 less k
        (300, 1745, 0.0, math.inf),  # cannot
        (1950, None, 142.9, 95.0),  # 220 tokens are expected
        (3000, 10, 10.0, 0.0),
    ],
)
def test_a_growing_context_counts_where_it_is_likely_to_get_there(
    prompt_tokens: int, max_tokens: int | None, undrafted: float, room: float
) -> None:
    request = replace(SHORT, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    prediction = _predict(request, _backend("e"))
    assert (prediction.undrafted, prediction.room) == (pytest.approx(undrafted, abs=0.1), room)


def test_long_requests_gather_and_short_ones_keep_away() -> None:
    pool = _Pool(*map(_backend, "abcd"))
    for name in "abcd":
        for _ in range(4):
            pool.send(SHORT, name)
    gathered = {pool.send(LONG).decision.backend for _ in range(3)}
    assert len(gathered) == 1
    assert not gathered & {pool.send(SHORT).decision.backend for _ in range(6)}


@pytest.mark.parametrize(
    ("beside", "limit", "learns", "accuses"),
    [
        (None, LIMIT, True, True),
        (SHORT, LIMIT, True, True),
        (LONG, LIMIT, False, False),
        (LONG, DrafterLimit(2048, Beyond.NONE), True, True),
        (LONG, DrafterLimit(2048, Beyond.WORSE), True, True),
        (LONG, None, True, False),  # there may be one that nobody knows
        (replace(SHORT, prompt_tokens=1000, max_tokens=None), LIMIT, False, False),  # it may be that long by now
        (replace(SHORT, prompt_tokens=1000, max_tokens=1000), LIMIT, True, True),
    ],
)
def test_what_runs_beside_a_request_beyond_the_limit_accuses_nobody(
    beside: RequestFeatures | None, limit: DrafterLimit | None, learns: bool, accuses: bool
) -> None:
    pool = _Pool(_backend("e", limit), _backend("f", limit))
    pool.answer(2.4, times=60)
    before = pool.learned()
    pool.fit()
    if beside is not None:
        pool.send(beside, "e")
        pool.now_s += 20.0
    for _ in range(30):
        pool.answer(1.0, times=1)
        assert learns or pool.learned() == pytest.approx(before)
    assert bool(pool.policy.detector.found) == accuses


@pytest.mark.parametrize("limit", [LIMIT, DrafterLimit(2048, Beyond.NONE)])
@pytest.mark.parametrize("others", [0, 3])
def test_beside_requests_of_others_a_replica_with_a_limit_is_not_accused(others: int, limit: DrafterLimit) -> None:
    """Nobody here knows how long these are."""
    pool = _Pool(_backend("e", limit, load=EngineLoad(others=others, at_s=time.monotonic())))
    for _ in range(60):
        pool.answer(2.4, times=1)
        pool.fit()
    pool.answer(1.0, times=30)
    assert bool(pool.policy.detector.found) == (not others or limit is not LIMIT)


def test_an_answer_that_was_not_expected_to_get_there_is_one_at_its_end() -> None:
    """Its prompt was counted too short, say."""
    pool = _Pool(_backend("e"))
    one, other = pool.send(SHORT), pool.send(SHORT)
    pool.now_s += 5.0
    pool.end(replace(one, prompt_tokens=3000), 1.0)
    after = pool.send(SHORT)
    pool.now_s += 5.0
    pool.end(other, 1.5)
    assert not pool.learned()
    pool.end(after, 2.4)
    assert pool.learned() == pytest.approx(2.0, rel=0.01)  # its drafts and its steps


def test_drafts_accepted_at_a_length_show_that_no_limit_is_below() -> None:
    pool = _Pool(_backend("e", None))
    long = pool.send(LONG)
    assert not pool.policy.known.replicas["e"].was_drafted(0.0)
    pool.end(long, 1.6)
    pool.send(LONG)
    assert pool.policy.known.replicas["e"].was_drafted(0.0)


def test_each_token_without_a_draft_is_a_step() -> None:
    assert [steps_of(200.0, undrafted, 0.0, 2.5) for undrafted in (0.0, 50.0, 200.0)] == [80.0, 110.0, 200.0]
    assert steps_of(200.0, 0.0, 1e9, 2.5) == pytest.approx(200.0)
    assert steps_of(1.5, 0.0, 0.0, 2.5) == 1.0


def test_whoever_is_there_loses_drafts_that_are_not_taken_already() -> None:
    reach = Reach(3.0, may_have_limit=True)
    reach.read(DrafterLimit(2048))
    assert reach.taken(200.0, 0.0, 8, 2.5) == pytest.approx(0.6 * 8 * 200)  # eight at a time lose 0.6 of each step
    assert reach.taken(200.0, 200.0, 8, 2.5) == pytest.approx(0.6 * 8 * 100)  # beside another one with as much left
    assert reach.taken(200.0, 0.0, 8, 1.0) == reach.taken(0.0, 0.0, 8, 2.5) == reach.taken(200.0, 0.0, 0, 2.5) == 0.0
    reach.read(DrafterLimit(2048, Beyond.NONE))
    assert reach.taken(200.0, 0.0, 8, 2.5) == 0.0
