"""What a worker and its parent say to each other: that it lives, what is current, and that a reload is wanted."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from backends.backend import Backend
from gateway.config.settings import PoolSettings
from gateway.reload.reloader import Outcome

_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Current:
    """To a worker: serve with these settings and replicas from now on."""

    number: int  # grows with each change
    settings: PoolSettings
    backends: Sequence[Backend]
    admin_digest: bytes  # SHA-256 of the admin key


@dataclass(frozen=True, slots=True)
class Alive:
    """From a worker, each second and after each change: its event loop runs, and it accepts connections."""

    number: int  # the last change that it was told
    problem: str = ""  # why that could not be made; empty if it was


@dataclass(frozen=True, slots=True)
class ReloadWanted:
    """From a worker: a client asks for a reload at `/admin/reload`."""

    dry_run: bool
    restart: str | None


@dataclass(frozen=True, slots=True)
class ReloadAnswered:
    """To the worker, in the order of its wishes: the lines that have changed, or why none has."""

    lines: list[str]
    outcome: Outcome | None = None
    problem: str = ""


class Link:
    """One end of the socket between a worker and its parent. Sending never waits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, opened: socket.socket) -> Link:
        """Return the end at an open socket."""
        return cls(*await asyncio.open_unix_connection(sock=opened))

    def send(self, message: object) -> None:
        """Send a message; nothing happens if the other process has ended."""
        data = pickle.dumps(message)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES) + data)

    async def messages(self) -> AsyncIterator[Any]:
        """Yield what arrives until the other process ends."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
                yield pickle.loads(await self._reader.readexactly(length))  # noqa: S301 -- of this gateway
        except (asyncio.IncompleteReadError, OSError):
            return

    def close(self) -> None:
        """Close this end."""
        self._writer.close()
