"""What an experiment compares, and which block of time is of which kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from policies.experiment.blocks import mix


@dataclass(frozen=True)
class Plan:
    """What is compared, and how.

    Parameters
    ----------
    id
        What tells it from others; the order of its blocks follows from it.
    arms
        Names of what is compared, two or more.
    groups
        Names of the replicas of each group; empty if all replicas that there are make up one. A conversation stays in
        its group.
    rotates
        Whether each group serves as another arm in each block, as with settings that need no restart; else, each arm
        has a group.
    block_s
        Seconds with the same shares of the traffic.
    explore
        By how much more than in proportion to its replicas a group gets in some blocks; 0 for never.
    usual
        Whether in one block of each cycle the pool serves as it does otherwise, which shows what comparing costs.
    before
        The same with shorter blocks, by which it was compared while requests took less time. These count too.
    """

    id: str
    arms: tuple[str, ...]
    groups: tuple[frozenset[str], ...]
    rotates: bool = False
    block_s: float = 60.0
    explore: float = 0.25
    usual: bool = True
    before: Plan | None = None

    @property
    def ids(self) -> list[str]:
        """Its id, and those of the plans before."""
        return [self.id, *(self.before.ids if self.before is not None else ())]

    def of_block(self, number: int) -> tuple[Plan, int]:
        """Return the plan of a block and its number there; those of plans before have negative numbers."""
        plan = self
        while number < 0 and plan.before is not None:
            plan, number = plan.before, number + BEFORE
        return plan, number

    @cached_property
    def salt(self) -> int:
        """A number that looks random, the same in all processes."""
        number = 0
        for each in self.id.encode():
            number = mix(number ^ each)
        return number

    @cached_property
    def _cycle(self) -> tuple[int | None, ...]:
        """The kinds of blocks: the group that gets more, -1 for none, and None for blocks as usual."""
        return (*[-1] * _EVEN, *range(self.count if self.explore else 0), *([None] if self.usual else []))

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.groups) or 1

    def shares(self, number: int) -> tuple[float, ...] | None:
        """Return the weights of each group's replicas in a block; None if all serve as usual."""
        plan, number = self.of_block(number)
        kind = plan._cycle[_shuffled(plan.salt, number, len(plan._cycle))]
        if kind is None:
            return None
        more = 1.0 + self.explore
        return tuple(1.0 if kind < 0 else more if group == kind else 1.0 / more for group in range(self.count))

    def arm_of(self, group: int, number: int) -> str:
        """Return the arm as which a group serves in a block."""
        if not self.rotates:
            return self.arms[group]
        arms = len(self.arms)
        return self.arms[(_shuffled(~self.salt, number, arms) + group) % arms]

    def group_of(self, backend: str) -> int:
        """Return the group of a replica; -1 for one in none."""
        if not self.groups:
            return 0
        return next((group for group, members in enumerate(self.groups) if backend in members), -1)


@lru_cache(maxsize=64)
def _shuffled(salt: int, number: int, count: int) -> int:
    """Return the place of a number in its cycle, of `count` numbers in an order that looks random."""
    cycle, place = divmod(number, count)
    return sorted(range(count), key=lambda each: mix(salt ^ (cycle * count + each)))[place]


_EVEN: Final = 3
"""Blocks of a cycle with shares in proportion to the replicas."""
BEFORE: Final = 12 << 40
"""More than the number of any block: what those of a plan before are less by. Neighbours stay neighbours."""
