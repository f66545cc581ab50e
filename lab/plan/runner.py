"""Playing mixes on windows of traffic, and on the same windows with other shares of a group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from backends.drafting.script import BLOCK_TOKENS
from lab.plan.mixes import Kind, Mix
from lab.plan.traffic import Windows, group_of
from lab.replay.request import ReplayRequest
from lab.replay.simulate import Replayed, ReplicaSpec, replay
from policies.build import build
from policies.policy import PolicySettings
from policies.roles import Learner

_SEEDS_APART = 1_000


class Task(NamedTuple):
    """A mix to play."""

    mix: Mix
    counted: tuple[int, ...]  # indices of the windows whose results are returned, ascending
    before: tuple[int, ...]  # indices of windows on which a policy may learn meanwhile, ascending
    seed: int
    # A group, and the share of all requests that it has instead of its own; None for the traffic as it is.
    shift: tuple[str, float] | None = None


RunAll = Callable[[Sequence[Task]], Sequence[Sequence[Replayed]]]
"""Runs tasks in parallel; returns the results of each task's counted windows, in the same order."""


@dataclass(frozen=True, slots=True)
class MixRunner:
    """Runs tasks; sent once to every worker.

    Each window starts with idle replicas; what the policy has learned stays.
    """

    calibration: str
    kinds: tuple[Kind, ...]
    policy: str
    settings: PolicySettings
    windows: Windows

    def __call__(self, task: Task) -> list[Replayed]:
        """Run one task; with the same seed, every mix gets the same draws."""
        logging.getLogger("policies").setLevel(logging.ERROR)  # messages about simulated replicas
        pool = [self._replica(f"{self.kinds[kind].method}-{number}", kind) for number, kind in enumerate(task.mix)]
        policy = build(self.policy, self.settings)
        also = task.before if isinstance(policy, Learner) else ()
        played = []
        for number in sorted({*task.counted, *also}):
            window = self.windows[number]
            if task.shift is not None:
                window = reshared(self.windows, number, *task.shift)
            result = replay(pool, window, policy, seed=_SEEDS_APART * task.seed + number)
            if number in task.counted:
                played.append(result)
        return played

    def _replica(self, name: str, index: int) -> ReplicaSpec:
        kind = self.kinds[index]
        blocks = max(1, kind.fit.tokens // BLOCK_TOKENS)
        return ReplicaSpec(name, kind.method, kind.config, self.calibration, kv_blocks=blocks)


def reshared(windows: Windows, number: int, group: str, share: float) -> tuple[ReplayRequest, ...]:
    """Return a window in which a group has another share of the requests, at the same times.

    Requests that are too many give way to random ones of the others, from all windows. The draws depend on the window
    alone, so that with a larger share the same requests and more are of the group.
    """
    rng = np.random.default_rng(number)
    window = windows[number]
    inside = np.array([group_of(request.features) == group for request in window])
    order = rng.permutation(len(window))
    ranked = np.concatenate([order[inside[order]], order[~inside[order]]])  # its own requests first
    wanted = np.zeros(len(window), np.bool_)
    wanted[ranked[: round(share * len(window))]] = True
    everyone = [request for each in windows for request in each]
    is_of_group = np.array([group_of(request.features) == group for request in everyone])
    donors = {True: np.flatnonzero(is_of_group), False: np.flatnonzero(~is_of_group)}
    draws = rng.random(len(window))
    made = list(window)
    for at in np.flatnonzero(wanted != inside).tolist():
        others = donors[bool(wanted[at])]
        made[at] = replace(everyone[others[int(draws[at] * len(others))]], arrived_s=window[at].arrived_s)
    return tuple(made)
