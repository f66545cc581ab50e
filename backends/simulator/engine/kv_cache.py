"""The KV cache as blocks of 16 tokens, with reuse of shared prefixes and eviction of the least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks in use, and blocks that are free but still remember a prefix.

    A request holds shared blocks, known by their hash and counted by their users, and private ones, of which only
    the number matters. A shared block that nobody uses any more is free, and remembered until its room is needed.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.used = 0
        self._users: dict[int, int] = {}
        self._remembered: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def free(self) -> int:
        """Blocks that can be had, remembered ones included."""
        return self.blocks - self.used

    def take(self, count: int) -> None:
        """Take private blocks, forgetting prefixes if there is no other room; the caller has checked `free`."""
        self.used += count
        while self.used + len(self._remembered) > self.blocks:
            self._remembered.popitem(last=False)

    def give_back(self, count: int) -> None:
        """Return private blocks."""
        self.used -= count

    def known(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of `hashes` are in the cache."""
        for index, block in enumerate(hashes):
            if block not in self._users and block not in self._remembered:
                return index
        return len(hashes)

    def unused(self, hashes: Sequence[int]) -> int:
        """Return how many of the blocks that `known` counted are remembered only: sharing them takes free room."""
        return sum(block in self._remembered for block in hashes)

    def share(self, hashes: Sequence[int]) -> None:
        """Use blocks that are in the cache."""
        for block in hashes:
            if block in self._remembered:
                del self._remembered[block]
                self.used += 1
                self._users[block] = 1
            else:
                self._users[block] += 1

    def publish(self, block: int) -> bool:
        """Make a private block shared; False if another one already stands for the same tokens."""
        if block in self._users:
            return False
        # A remembered twin is dropped for the one in use.
        self._remembered.pop(block, None)
        self._users[block] = 1
        return True

    def release(self, hashes: Sequence[int]) -> None:
        """Stop using shared blocks. The end of a chain is forgotten first: it is of no use without the rest."""
        for block in reversed(hashes):
            users = self._users[block] - 1
            if users:
                self._users[block] = users
            else:
                del self._users[block]
                self._remembered[block] = None
                self.used -= 1
