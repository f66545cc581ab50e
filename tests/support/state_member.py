"""A gateway's statistics and ledger, without the gateway."""

from __future__ import annotations

import time
from dataclasses import dataclass
from uuid import uuid4

from gateway.state.ledger import Ledger
from gateway.state.store import Store
from policies.statistics import Key, Statistics, Sums, Table

LENGTH = Table("length", 2, half_life_s=7200.0, overflow=lambda key: key)
STEPS = Table("steps", 3, half_life_s=900.0, overflow=lambda key: key)


@dataclass
class Clock:
    """A clock that stands still, near the present because stores remove expired pages."""

    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.now_s = self.now_s or time.time()

    def __call__(self) -> float:
        return self.now_s


class Member:
    """One gateway: statistics, and their exchange with a store."""

    def __init__(
        self,
        store: Store,
        clock: Clock | None = None,
        model: str = "m",
        tables: tuple[Table, ...] = (LENGTH, STEPS),
    ) -> None:
        self.store = store
        self.clock = clock or Clock()
        self.statistics = Statistics(tables, self.clock)
        self.ledger = Ledger(model, self.statistics, uuid4().hex)

    def sync(self) -> None:
        self.ledger.stage()
        self.exchange()
        self.ledger.settle()

    def exchange(self) -> None:
        self.ledger.exchange(self.store, self.store.stamps())

    def buckets(self, table: Table = LENGTH) -> dict[Key, Sums]:
        return {key: tuple(round(number, 6) for number in sums) for key, sums in self.statistics.buckets(table).items()}


def in_step(*members: Member) -> None:
    """Synchronise until all members agree: detecting a loss, writing and reading take a round each."""
    for _ in range(4):
        for member in members:
            member.sync()
