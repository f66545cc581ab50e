"""What is learned from a replica that reports what cannot be, and how soon honest answers repair it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.decision import Decision, Outcome
from policies.features.request import Endpoint, RequestFeatures
from policies.learned import replica, table
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.statistics import Table

STEP_S = 0.012
PER_STEP = {"liar": 2.4, "honest": 2.4, "baseline": 1.0}
REQUEST = RequestFeatures("m", Endpoint.CHAT, temperature=0.0, workload="chat", template="t", prompt_tokens=200)


class Pool:
    """Three replicas, of which one may lie, and a policy that has seen 60 honest answers of each."""

    def __init__(self) -> None:
        methods = {"liar": Method.EAGLE3, "honest": Method.EAGLE3, "baseline": Method.BASELINE}
        self.backends = [
            Backend(name, "m", method, "http://a", 3 if method is Method.EAGLE3 else 0)
            for name, method in methods.items()
        ]
        self.policy = Learned(LearnedSettings(seed=1, guardrail={"share": 0}))
        self._now_s, self._rng, self._answers = 1e6, Random(3), 0
        self.policy.set_clock(lambda: self._now_s)
        self.answer_all(180)
        self.before = self.predicted_s()

    def answer(self, backend: Backend, request: RequestFeatures = REQUEST, **lies: Any) -> None:
        decision = self.policy.follow(Decision(backend.name, "x", "y"), request, [backend])
        per_step = PER_STEP[backend.name] * (self._rng.uniform(0.9, 1.1) if backend.name != "baseline" else 1.0)
        decode_s = (150 / per_step - 1) * STEP_S
        self._now_s += 0.02 + decode_s
        values = {"tpot_s": decode_s / 149, "output_tokens": 150, "tokens_per_step": per_step, "prompt_tokens": 200}
        times = {"ttft_s": 0.02, "e2e_s": 0.02 + decode_s}
        self.policy.observe(Outcome(request, decision, backend.method, 200, **(times | values | lies)))
        self._answers += 1
        if self._answers % 15 == 0:
            self.fit()

    def fit(self) -> None:
        if (work := self.policy.maintenance()) is not None:
            work()

    def answer_all(self, count: int) -> None:
        for number in range(count):
            self.answer(self.backends[number % 3])

    def predicted_s(self) -> dict[str, float]:
        self.fit()
        return {each.backend: each.score or 0.0 for each in self.policy.assess(REQUEST, self.backends)}

    def error(self, *names: str) -> float:
        """Return the largest factor between what is predicted of some replicas now and before."""
        now = self.predicted_s()
        return max(max(now[name] / self.before[name], self.before[name] / now[name]) for name in names)


LIES: dict[str, dict[str, Any]] = {
    "tokens of 1e9, none drafted": {"output_tokens": 10**9, "tokens_per_step": 1.0, "tpot_s": 1e-9},
    "tokens of 1e9, all drafted": {"output_tokens": 10**9, "tokens_per_step": 5e8, "tpot_s": 1e-9},
    "tokens of a whole context": {"output_tokens": 131072, "tokens_per_step": 1.0, "tpot_s": 0.7 / 131072},
    "more tokens a step than are drafted": {"tokens_per_step": 150.0},
    "steps of a nanosecond": {"tokens_per_step": 1.0, "tpot_s": 1e-9},
    "steps of a minute": {"tokens_per_step": 1.0, "tpot_s": 60.0},
    "steps that are barely possible": {"tokens_per_step": 1.0, "tpot_s": 1e-4},
    "prompts of a thousandth": {"prompt_tokens": 2**24, "cached_tokens": 0, "ttft_s": 1e-6},
}


@pytest.mark.slow
@pytest.mark.parametrize("lies", LIES.values(), ids=LIES.keys())
def test_lies_of_one_replica_are_bounded_and_repaired(lies: dict[str, Any]) -> None:
    pool = Pool()
    for _ in range(55):
        pool.answer(pool.backends[0], **lies)
    assert pool.error("honest", "baseline") < 4.0
    assert min(pool.predicted_s().values()) > 0.05
    pool.answer_all(300)
    assert pool.error("liar", "honest", "baseline") < 2.0
    pool.answer_all(600)
    assert pool.error("liar", "honest", "baseline") < 1.4


def test_several_lies_together_are_bounded_and_repaired() -> None:
    pool = Pool()
    for number in range(110):
        pool.answer(pool.backends[0], **[*LIES.values()][number % len(LIES)])
    assert pool.error("honest", "baseline") < 4.0
    pool.answer_all(900)
    assert pool.error("liar", "honest", "baseline") < 1.4


@pytest.mark.parametrize("restricted", [True, False])
def test_answers_from_which_tokens_were_kept_accuse_nobody(restricted: bool) -> None:
    pool = Pool()
    for number in range(60):
        request = replace(REQUEST, restricted=restricted, client=f"client {number % 3}")
        pool.answer(pool.backends[1], request, tokens_per_step=1.0)
    assert bool(pool.policy.detector.found) is not restricted


IMPOSSIBLE: dict[str, tuple[Table, tuple[str, ...], tuple[float, ...]]] = {
    "tokens per step": (table.PER_STEP, ("eagle3:3", "0/0", "chat", "", ""), (1e4, 2e5, 1e4, 2e5)),
    "of no arm": (table.PER_STEP, ("eagle3:x", "0/0", "chat", "", ""), (1e4, 2e5, 1e4, 2e5)),
    "of no kind": (table.PER_STEP, ("eagle3:3", "0/0"), (1e4, 2e5, 1e4, 2e5)),
    "length": (table.LENGTH, ("", "other", "8/", "", ""), (1e4, 1e6, 1e4, 1e6)),
    "steps, too fast": (replica.STEPS, ("liar",), (1e4, -2e5, *[1e-9] * 18)),
    "steps, negative": (replica.STEPS, ("liar",), (1e4, 0.0, *[-1.0] * 18)),
    "fewer than none": (replica.STEPS, ("liar",), (-1e4, 0.0, *[1.0] * 18)),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_sums_of_others_that_cannot_be_are_bounded(what: str) -> None:
    pool, (table, key, sums) = Pool(), IMPOSSIBLE[what]
    statistics = pool.policy.statistics
    statistics.set_others_of(table.name, int(statistics.clock() // table.epoch_s), {key: sums})
    pool.answer_all(3)
    assert pool.error("honest", "baseline") < 4.0
    assert pool.error("liar") < 4.0
