"""What is learned from a replica that reports what cannot be, and how soon honest answers repair it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.learned import replica, table
from policies.statistics import Table
from tests.policies.learned.pool import Pool, request

REQUEST = request(template="t")


class Liars(Pool):
    """A replica that may lie, one like it and one that does not draft, each with 60 honest answers."""

    def __init__(self) -> None:
        super().__init__()
        baseline, *_, head = self.backends
        self.backends = [replace(head, name="liar"), replace(head, name="honest"), baseline]
        self.be_honest(60)
        self.before = self.costs(REQUEST)

    def be_honest(self, answers: int) -> None:
        for _ in range(answers // 5):
            self.teach(REQUEST, 5, liar=2.4, honest=2.4)

    def error(self, *names: str) -> float:
        """Return the largest factor between what is predicted of some replicas now and before."""
        now = self.costs(REQUEST)
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


@pytest.mark.parametrize("lies", [*([each] for each in LIES.values()), [*LIES.values()]], ids=[*LIES, "all together"])
def test_lies_of_one_replica_are_bounded_and_repaired(lies: list[dict[str, Any]]) -> None:
    pool = Liars()
    for number in range(60):
        pool.send("liar", REQUEST, **lies[number % len(lies)])
        if number % 15 == 14:
            pool.fit()
    assert pool.error("honest", "baseline") < 4.0
    assert min(pool.costs(REQUEST).values()) > 0.05
    pool.be_honest(100)
    assert pool.error("liar", "honest", "baseline") < 2.0
    pool.be_honest(200)
    assert pool.error("liar", "honest", "baseline") < 1.4


@pytest.mark.parametrize("restricted", [True, False])
def test_answers_from_which_tokens_were_kept_accuse_nobody(restricted: bool) -> None:
    pool = Liars()
    for number in range(60):
        pool.send("honest", replace(REQUEST, restricted=restricted, client=f"client {number % 3}"), per_step=1.0)
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
    pool, (table, key, sums) = Liars(), IMPOSSIBLE[what]
    pool.policy.statistics.set_others_of(table.name, int(pool.now_s // table.epoch_s), {key: sums})
    pool.teach(REQUEST, 1, liar=2.4, honest=2.4)
    assert pool.error("liar", "honest", "baseline") < 4.0
