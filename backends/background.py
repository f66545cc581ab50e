"""Background work: every task starts here, so that none fails silently.

Failures are logged, once a minute for each piece of work, and counted; with a traceback, unless a disk is at fault.
Continuous work restarts after a pause.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

log = logging.getLogger(__name__)

CORE_WORK: Final = (
    "accounting",
    "announcement",
    "connections",
    "default temperature",
    "discovery",
    "engines",
    "lab",
    "observers",
    "open files",
    "own paths",
    "peers",
    "policies",
    "pool file",
    "probes",
    "reloads",
    "requests",
    "state",
    "tick",
    "workers",
)
"""The core's kinds of work, used as label values; a room declares its own."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses before failed work restarts: doubled each time, until it has run for a minute."""
_SETTLED_S = 60.0

on_failure: list[Callable[[str], None]] = []
"""Called with the kind of work that failed."""
_MOST_THREADS = 32
_LAST_S = 1.0
_tasks: set[asyncio.Task[Any]] = set()  # event loops keep weak references only
_SAID_AGAIN_S = 60.0
_MOST_SAID = 1000
_SELDOM: Final = "(logged once a minute; gateway_background_failures_total counts failures)"
_OF_DISKS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Error numbers of a disk that is full or read-only, which is no defect: no traceback."""


class Seldom:
    """A rate limiter for log lines: once a minute per key.

    Examples
    --------
    >>> seldom = Seldom()
    >>> seldom.may_say("full"), seldom.may_say("full"), seldom.may_say("slow")
    (True, False, True)
    """

    def __init__(self) -> None:
        self._said_s: dict[object, float] = {}

    def may_say(self, key: object = None) -> bool:
        """Return whether the caller may log now; if so, count it as logged."""
        now_s = time.monotonic()
        if now_s - self._said_s.get(key, -math.inf) < _SAID_AGAIN_S:
            return False
        if len(self._said_s) >= _MOST_SAID:
            self._said_s.clear()
        self._said_s[key] = now_s
        return True


_logged = Seldom()
T = TypeVar("T")


def start(
    work: str, coroutine: Coroutine[Any, Any, T], *, of: str = "", raises: type[Exception] | None = None
) -> asyncio.Task[T]:
    """Start work that ends on its own, and note what it raises."""
    task = asyncio.get_running_loop().create_task(coroutine, name=f"{work} {of}".rstrip())
    _tasks.add(task)

    def ended(task: asyncio.Task[T]) -> None:
        _tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if raises is None or not isinstance(error, raises):
            note(work, error, of=of)

    task.add_done_callback(ended)
    return task


def keep_running(
    work: str,
    run: Callable[[], Coroutine[Any, Any, None]],
    *,
    of: str = "",
    stopping: asyncio.Event | None = None,
) -> asyncio.Task[None]:
    """Start work that runs until it returns or is cancelled; if it raises, restart it after a pause."""
    return start(work, _keep_running(work, run, of, stopping or asyncio.Event()), of=of)


def is_cancelled() -> bool:
    """Return whether the current task has been cancelled; a simultaneous failure hides that from `except`."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _keep_running(
    work: str, run: Callable[[], Coroutine[Any, Any, None]], of: str, stopping: asyncio.Event
) -> None:
    pause_s = FIRST_PAUSE_S
    while not stopping.is_set():
        began_s = time.monotonic()
        try:
            await run()
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled():
                raise asyncio.CancelledError from error
            failure: BaseException = error  # includes the cancellation of something it awaited
        else:
            return
        if time.monotonic() - began_s >= _SETTLED_S:
            pause_s = FIRST_PAUSE_S
        note(work, failure, of=of, then=f"; it is begun again in {pause_s:g} s")
        try:
            async with asyncio.timeout(pause_s):
                await stopping.wait()
        except TimeoutError:
            pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)


@contextmanager
def guarded(work: str, *, of: str = "") -> Iterator[None]:
    """Log and count what a block raises, and continue after it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- the code that follows must run in any case
        note(work, error, of=of)


def note(work: str, error: BaseException, *, of: str = "", then: str = "") -> None:
    """Log and count a failure; safe in any thread."""
    if _logged.may_say((work, of)):
        what, rest = f"{work} of {of}" if of else work, f"{then} {_SELDOM}"
        if isinstance(error, OSError) and error.errno in _OF_DISKS:
            text = "%s cannot write to %s: %s; free space there, or make it writable%s"
            log.warning(text, what, error.filename or "its disk", error.strerror, rest)
        else:
            log.error("%s failed%s", what, rest, exc_info=error)
    for count in on_failure:
        try:
            count(work)
        except Exception:
            log.exception("a failure could not be counted")


class _Threads(ThreadPoolExecutor):
    """An event loop's threads; the loop ends without waiting for them, as what they read may never answer."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def run_process(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` in the event loop of this process, and return its status."""
    import uvloop

    async def with_threads() -> int:
        asyncio.get_running_loop().set_default_executor(_Threads(_MOST_THREADS, "thread"))
        return await main

    return uvloop.run(with_threads())


def leave_stdout() -> None:
    """Discard further output, as standard output cannot be written: Python would retry at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_process(status: int) -> NoReturn:
    """End this process without waiting for hung threads, such as those reading from a mount that does not answer."""
    end_s = time.monotonic() + _LAST_S
    others = [each for each in threading.enumerate() if not each.daemon and each is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, end_s - time.monotonic()))
    if hanging := [thread.name for thread in others if thread.is_alive()]:
        log.warning("ended without %s, which hang: a file or a mount may not answer", ", ".join(hanging))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
