"""Bounds how often a client may have all engines asked for a stored response that is unknown here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from gateway.dialects.errors import GatewayError
from gateway.routing.keys import Client

PER_MINUTE: Final = 300
AT_ONCE: Final = 4
_AT_ONCE_OF_ALL: Final = 16  # fewer than a probe's connections, so that probing continues
_MOST_CLIENTS: Final = 10_000


@dataclass(slots=True)
class _Asking:
    """The lookups of a client within a minute."""

    minute: int = 0
    asked: int = 0
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


class Lookups:
    """Bounds the lookups of each client, and of all together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # returns monotonic seconds
        self._clients: dict[str, _Asking] = {}
        self._places = asyncio.Semaphore(_AT_ONCE_OF_ALL)

    @asynccontextmanager
    async def place(self, client: Client) -> AsyncIterator[None]:
        """Wait for a place; raise if the client has no lookups left."""
        if len(self._clients) >= _MOST_CLIENTS:
            self._clients.clear()
        asking, now_s = self._clients.setdefault(client.id, _Asking()), self._clock()
        if asking.minute != (minute := int(now_s // 60)):
            asking.minute, asking.asked = minute, 0
        if asking.asked >= PER_MINUTE:
            raise GatewayError(
                429,
                f"Key {client.name!r} has referred to {PER_MINUTE} stored responses in a minute that are not known "
                "here: try again in a minute.",
                code="too_many_unknown_responses",
                retry_after_s=60.0 - now_s % 60.0,
            )
        asking.asked += 1
        async with asking.places, self._places:
            yield
