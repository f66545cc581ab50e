"""Plays mixes on windows of traffic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from backends.drafting.script import BLOCK_TOKENS
from lab.plan.mixes import Mix, ReplicaKind
from lab.plan.traffic import Windows, one_after_another
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.simulate import Replayed, replay
from policies.build import build
from policies.policy import PolicySettings


class MixTask(NamedTuple):
    """A mix to play."""

    mix: Mix
    counted: tuple[int, ...]  # indices of the windows whose results to return, ascending
    before: tuple[int, ...]  # indices of windows to play as well, for the load and for a policy that learns
    seed: int


RunAll = Callable[[Sequence[MixTask]], Sequence[Sequence[Replayed]]]
"""Runs tasks in parallel; returns the results of each task's counted windows, in order."""


@dataclass(frozen=True, slots=True)
class MixRunner:
    """Runs tasks; sent once to every worker.

    The windows follow each other without a pause, so all but the first start under the load of the one before.
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
        numbers = sorted({*task.counted, *task.before})
        requests = one_after_another([self.windows[number] for number in numbers])
        played = replay(pool, requests, build(self.policy, self.settings), seed=task.seed)
        ends = accumulate(len(self.windows[number]) for number in numbers)
        parts = dict(zip(numbers, pairwise([0, *ends]), strict=True))
        return [played.part(*parts[number]) for number in task.counted]

    def _replica(self, name: str, index: int) -> ReplicaSpec:
        kind = self.kinds[index]
        blocks = max(1, kind.fit.tokens // BLOCK_TOKENS)
        return ReplicaSpec(name, kind.method, kind.config, self.calibration, kv_blocks=blocks)
