"""Runs tasks on all cores of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

Task = TypeVar("Task")
Result = TypeVar("Result")

_THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_work: list[Callable[[Any], Any]] = []  # in a worker process: the function it runs


@contextmanager
def all_cores(
    work: Callable[[Task], Result], jobs: int | None = None, label: str = ""
) -> Iterator[Callable[[Sequence[Task]], list[Result]]]:
    """Yield a function that applies `work` to many tasks, in processes that live until the block ends.

    With a label, a progress bar on a terminal shows how many tasks are done.

    Examples
    --------
    >>> with all_cores(abs, jobs=1) as run_all:
    ...     run_all([-1, 2])
    [1, 2]
    """
    count = jobs or len(os.sched_getaffinity(0))
    if count == 1:
        yield lambda tasks: _collected(map(work, tasks), len(tasks), label)
        return
    context = multiprocessing.get_context("spawn")  # a forked process inherits locks of threads that it lacks
    with _single_threaded_children(), context.Pool(count, _start_worker, (work,)) as pool:
        yield lambda tasks: _collected(pool.imap(_run_task, tasks), len(tasks), label)
        pool.close()
        pool.join()


def _collected(results: Iterable[Result], count: int, label: str) -> list[Result]:
    """Collect the results of `count` tasks, showing progress."""
    console, hidden = Console(stderr=True), not label or not sys.stderr.isatty()
    return list(track(results, label, count, console=console, transient=True, disable=hidden))


@contextmanager
def _single_threaded_children() -> Iterator[None]:
    """Limit processes started in this block to one thread for linear algebra, as there is one process per core.

    With more threads than cores, threads wait for each other, and a fit of milliseconds takes ten times as long.
    """
    kept = {name: os.environ.get(name) for name in _THREAD_COUNT_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_COUNT_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start_worker(work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends its workers
    _work[:] = [work]


def _run_task(task: Any) -> Any:
    return _work[0](task)
