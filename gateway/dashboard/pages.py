"""The open dashboards of a gateway process: each snapshot is made once, and sent to all as the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from fastapi import Response
from starlette.types import Receive, Scope, Send

from backends import background
from gateway.dialects.errors import GatewayError

MAX_PAGES = 64
"""Most streams of a gateway process; each holds a connection. Those without a key, of a public dashboard, get half."""
_LATE_S = 1.0
"""Seconds after which a stream that is to end is cut off."""


class Pages:
    """The streams of a gateway process.

    A stream that is slow to receive skips snapshots: it is sent the next one once it has taken the last.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first  # called when the first of them opens
        self.open = 0  # number of streams
        self._keyless = 0
        self._newest = b""
        self._changed = asyncio.Event()
        self._end = asyncio.Event()  # of the streams that are open
        self._is_closed = False

    def publish(self, event: bytes) -> None:
        """Send an event to all streams."""
        self._newest = event
        self._wake()

    def end(self) -> None:
        """End the streams that are open; their clients may open others."""
        end, self._end = self._end, asyncio.Event()
        end.set()
        self._wake()

    def close(self) -> None:
        """End all streams, and refuse others."""
        self._is_closed = True
        self.end()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @contextlib.contextmanager
    def enter(self, *, has_key: bool) -> Iterator[asyncio.Event]:
        """Count a stream while it is open; yields what is set when it is to end."""
        if self._is_closed:
            raise GatewayError(503, "The gateway is stopping.", code="gateway_stopping", retry_after_s=1.0)
        if self.open >= MAX_PAGES or (not has_key and self._keyless >= MAX_PAGES // 2):
            raise GatewayError(
                503,
                f"{self.open} dashboards are open at this gateway process. Close one, and load this one again.",
                code="too_many_dashboards",
                retry_after_s=10.0,
            )
        self.open += 1
        self._keyless += not has_key
        try:
            if self.open == 1:
                self._on_first()
            yield self._end
        finally:
            self.open -= 1
            self._keyless -= not has_key

    async def events(self, end: asyncio.Event) -> AsyncIterator[bytes]:
        """Yield the events until `end`, without those that come while the caller is busy with an earlier one."""
        while not end.is_set():
            changed = self._changed
            await changed.wait()
            if not end.is_set():
                yield self._newest


class EventStream(Response):
    """A stream of events, for as long as the client reads it."""

    def __init__(self, pages: Pages, first: Callable[[], bytes], *, has_key: bool) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._pages = pages
        self._first = first  # returns what is sent first, once the stream is open
        self._has_key = has_key  # whether its client has sent a key that may read it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        with self._pages.enter(has_key=self._has_key) as end:
            sending = background.start("dashboard", self._send(send, end), raises=Exception)
            over = [background.start("dashboard", each) for each in (_until_gone(receive), _until_late(end))]
            try:
                await asyncio.wait([sending, *over], return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()  # which raises what has failed
            finally:
                for task in (sending, *over):
                    task.cancel()
                await asyncio.gather(sending, *over, return_exceptions=True)

    async def _send(self, send: Send, end: asyncio.Event) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first(), "more_body": True})
        async for event in self._pages.events(end):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until_late(end: asyncio.Event) -> None:
    """Wait until a stream that was to end should have: its client does not read."""
    await end.wait()
    await asyncio.sleep(_LATE_S)
