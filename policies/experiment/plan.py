"""What an experiment compares, and the kind of each block of time."""

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
        Identifies the plan; determines the order of its blocks.
    arms
        Names of the arms, two or more.
    groups
        Names of the replicas of each group; empty if all replicas are one group. A conversation stays in its group.
    rotates
        Whether each group serves as a different arm in each block, as with settings that need no restart; else each arm
        has its own group.
    block_s
        Seconds of a block, with constant shares of the traffic.
    explore
        How much more a group gets in some blocks, relative to its replicas' share; 0 for never.
    usual
        Whether the pool serves as usual in one block of each cycle, which shows the cost of comparing.
    before
        The plan with shorter blocks that was used while requests took less time. Its blocks count too.
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
        """Its id, and those of earlier plans."""
        return [self.id, *(self.before.ids if self.before is not None else ())]

    def of_block(self, number: int) -> tuple[Plan, int]:
        """Return the plan of a block and its number there; blocks of earlier plans have negative numbers."""
        plan = self
        while number < 0 and plan.before is not None:
            plan, number = plan.before, number + BEFORE
        return plan, number

    @cached_property
    def salt(self) -> int:
        """A pseudorandom number, the same in all processes."""
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
        """Return the weight of each group's replicas in a block; None if all serve as usual."""
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
    """Return the place of a number in its cycle of `count` numbers, in pseudorandom order."""
    cycle, place = divmod(number, count)
    return sorted(range(count), key=lambda each: mix(salt ^ (cycle * count + each)))[place]


_EVEN: Final = 3
"""Blocks of a cycle with shares proportional to replicas."""
BEFORE: Final = 12 << 40
"""Offset between the block numbers of consecutive plans, larger than any. Neighbors stay neighbors."""
