"""Waiting for conditions: the only place where tests sleep, besides scripted peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_POLL_S, _LONGEST_POLL_S = 0.005, 0.1
TIMEOUT_S = 90.0
"""How long a condition may take. Only a failing test waits this long, so it allows for a very busy machine."""


async def eventually(condition: Callable[[], object], timeout_s: float = TIMEOUT_S, what: str = "") -> None:
    """Wait until a condition holds, while the event loop runs.

    Raises
    ------
    AssertionError
        If it does not hold within `timeout_s` seconds.
    """
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what or condition}"
        await asyncio.sleep(_POLL_S)


async def eventually_async(
    condition: Callable[[], Awaitable[object]], timeout_s: float = TIMEOUT_S, what: str = ""
) -> None:
    """Wait until an asynchronous condition holds; see `eventually`."""
    began_s = time.monotonic()
    while not await condition():
        await asyncio.sleep(_pause_s(began_s, timeout_s, what or condition))


async def stays(condition: Callable[[], object], for_s: float, what: str = "") -> None:
    """Check that a condition holds now and for `for_s` seconds more.

    Raises
    ------
    AssertionError
        As soon as it does not.
    """
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        assert condition(), f"did not hold for {for_s} s: {what or condition}"
        await asyncio.sleep(_POLL_S)


def eventually_blocking(condition: Callable[[], object], timeout_s: float = TIMEOUT_S, what: str = "") -> None:
    """Wait until a condition holds, without an event loop; see `eventually`."""
    began_s = time.monotonic()
    while not condition():
        time.sleep(_pause_s(began_s, timeout_s, what or condition))


def _pause_s(began_s: float, timeout_s: float, what: object) -> float:
    """Return the pause before the next try, a tenth of the wait so far: asking a process often slows what it does."""
    waited_s = time.monotonic() - began_s
    assert waited_s < timeout_s, f"not within {timeout_s} s: {what}"
    return min(max(_POLL_S, waited_s / 10), _LONGEST_POLL_S)
