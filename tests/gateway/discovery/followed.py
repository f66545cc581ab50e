"""A source that is followed, with what it has reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from gateway.discovery.source import Replica, ReplicaSource
from tests.support.waiting import eventually


class Followed:
    """A source that is followed."""

    def __init__(self, source: ReplicaSource) -> None:
        self.reports: list[dict[str, Replica]] = []
        self.task = asyncio.create_task(source.follow(self._report))

    def _report(self, replicas: Collection[Replica]) -> None:
        self.reports.append({each.name: each for each in replicas})

    async def until(self, *names: str) -> dict[str, Replica]:
        await eventually(lambda: self.reports and set(self.reports[-1]) == set(names), what=f"{names}")
        return self.reports[-1]


@asynccontextmanager
async def following(source: ReplicaSource) -> AsyncIterator[Followed]:
    followed = Followed(source)
    try:
        yield followed
    finally:
        followed.task.cancel()
        await asyncio.gather(followed.task, return_exceptions=True)
