"""The KV cache: blocks of 16 tokens, reuse of shared prefixes, eviction of the least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """The blocks of a KV cache: used ones, and free ones that still hold a reusable prefix.

    A request holds shared blocks, identified by hash and reference-counted, and private blocks, of which only the
    number matters. A shared block without users is free, but it stays reusable until its space is needed.

    Examples
    --------
    >>> pool = BlockPool(4)
    >>> pool.take(2)
    >>> pool.publish(11)
    True
    >>> pool.release([11])
    >>> pool.free, pool.count_cached([11, 12])
    (3, 1)
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.used = 0
        self._users: dict[int, int] = {}
        self._remembered: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def free(self) -> int:
        """Blocks that can be taken, including those that hold an unused prefix."""
        return self.blocks - self.used

    def take(self, count: int) -> None:
        """Take private blocks, evicting unused prefixes if necessary; the caller has checked `free`."""
        self.used += count
        while self.used + len(self._remembered) > self.blocks:
            self._remembered.popitem(last=False)

    def give_back(self, count: int) -> None:
        """Return private blocks."""
        self.used -= count

    def count_cached(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of `hashes` are in the cache."""
        for index, block in enumerate(hashes):
            if block not in self._users and block not in self._remembered:
                return index
        return len(hashes)

    def count_unused(self, hashes: Sequence[int]) -> int:
        """Return how many of these cached blocks have no user: sharing them takes free space."""
        return sum(block in self._remembered for block in hashes)

    def share(self, hashes: Sequence[int]) -> None:
        """Add a user to blocks that are in the cache."""
        for block in hashes:
            if block in self._remembered:
                del self._remembered[block]
                self.used += 1
                self._users[block] = 1
            else:
                self._users[block] += 1

    def publish(self, block: int) -> bool:
        """Make a private block shared; return False if another shared block holds the same tokens."""
        if block in self._users:
            return False
        # An unused block with the same tokens is replaced by the one in use.
        self._remembered.pop(block, None)
        self._users[block] = 1
        return True

    def release(self, hashes: Sequence[int]) -> None:
        """Remove a user from shared blocks. The end of a chain is evicted first: it is useless without the rest."""
        for block in reversed(hashes):
            users = self._users[block] - 1
            if users:
                self._users[block] = users
            else:
                del self._users[block]
                self._remembered[block] = None
                self.used -= 1
