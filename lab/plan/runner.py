"""Plays mixes on windows of traffic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backends.drafting.script import BLOCK_TOKENS
from lab.plan.mixes import Mix, ReplicaKind
from lab.plan.traffic import Windows
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.simulate import Replayed, replay
from policies.build import build
from policies.policy import PolicySettings
from policies.roles import Learner

_SEEDS_APART = 1_000


class MixTask(NamedTuple):
    """A mix to play."""

    mix: Mix
    counted: tuple[int, ...]  # indices of the windows whose results to return, ascending
    before: tuple[int, ...]  # indices of windows on which a policy may also learn, ascending
    seed: int


RunAll = Callable[[Sequence[MixTask]], Sequence[Sequence[Replayed]]]
"""Runs tasks in parallel; returns the results of each task's counted windows, in order."""


@dataclass(frozen=True, slots=True)
class MixRunner:
    """Runs tasks; sent once to every worker.

    Each window starts with idle replicas; the policy keeps what it has learned.
    """

    calibration: str
    kinds: tuple[ReplicaKind, ...]
    policy: str
    settings: PolicySettings
    windows: Windows

    def __call__(self, task: MixTask) -> list[Replayed]:
        """Run one task; with the same seed, every mix gets the same draws."""
        logging.getLogger("policies").setLevel(logging.ERROR)  # messages about simulated replicas
        pool = [self._replica(f"{self.kinds[kind].method}-{number}", kind) for number, kind in enumerate(task.mix)]
        policy = build(self.policy, self.settings)
        also = task.before if isinstance(policy, Learner) else ()
        played = []
        for number in sorted({*task.counted, *also}):
            result = replay(pool, self.windows[number], policy, seed=_SEEDS_APART * task.seed + number)
            if number in task.counted:
                played.append(result)
        return played

    def _replica(self, name: str, index: int) -> ReplicaSpec:
        kind = self.kinds[index]
        blocks = max(1, kind.fit.tokens // BLOCK_TOKENS)
        return ReplicaSpec(name, kind.method, kind.config, self.calibration, kv_blocks=blocks)
