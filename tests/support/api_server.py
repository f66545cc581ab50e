"""What servers share that play the API server of Kubernetes: the folder of the service account, and connections."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.support.event_loop import stop_listening


@dataclass
class ApiServer:
    """A server that a pod reaches with the files of its service account; its subclasses answer.

    Attributes
    ----------
    account
        The folder of the service account.
    token
        The token that the server accepts.
    """

    account: Path
    token: str = field(default="token-1", kw_only=True)
    url: str = field(default="", init=False)
    _server: asyncio.Server = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def __aenter__(self) -> Self:
        self.account.mkdir(exist_ok=True)
        (self.account / "namespace").write_text("inference")
        (self.account / "token").write_text(f"{self.token}\n")
        port = int(self.url.rpartition(":")[2] or 0)  # the same if it is started again
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_listening(self._server)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, which ends when this returns."""
        raise NotImplementedError

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()
