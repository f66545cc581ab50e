"""An event loop in a thread, for tests that have none themselves; the end of a server on any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tests.support.waiting import TIMEOUT_S

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@contextlib.contextmanager
def event_loop_in_thread() -> Iterator[Run]:
    """Run an event loop; yield a function that returns the result of a coroutine on it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server without losing the connections that it has just accepted.

    CPython 3.11 neither serves nor closes a connection whose server is closed between accepting and serving it. Here
    each one has its task when this returns.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(3):  # the connection is accepted, made, and its task started
        await asyncio.sleep(0)
    server.close()
