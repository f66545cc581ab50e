"""Run tasks on all cores of this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_PROGRESS_EVERY_S = 0.25
_THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_work: list[Callable[[Any], Any]] = []  # in a worker process: the one function it runs
_listeners: list[Callable[[int], None]] = []  # called by `report_progress`


@contextmanager
def all_cores(
    work: Callable[[Task], Result], jobs: int | None = None, progress: Callable[[int], None] | None = None
) -> Iterator[Callable[[Sequence[Task]], list[Result]]]:
    """Yield a function that applies `work` to many tasks, in processes that live until the block ends.

    Examples
    --------
    >>> with all_cores(abs, jobs=1) as run_all:
    ...     run_all([-1, 2])
    [1, 2]
    """
    count = jobs or len(os.sched_getaffinity(0))
    if count == 1:
        if progress is not None:
            _listeners.append(progress)
        try:
            yield lambda tasks: [work(task) for task in tasks]
        finally:
            if progress is not None:
                _listeners.remove(progress)
        return
    context = multiprocessing.get_context("spawn")  # a forked process inherits locks held by threads it does not have
    done = context.Value("q")
    with _single_threaded_children(), context.Pool(count, _start_worker, (work, done)) as pool:
        yield lambda tasks: _collect(pool.map_async(_run_task, tasks, chunksize=1), done, progress)
        pool.close()
        pool.join()


def report_progress(count: int) -> None:
    """Report, from within a task, that `count` more units are done. Takes a lock, so call it sparingly."""
    for listener in _listeners:
        listener(count)


def _collect(answers: Any, done: Any, progress: Callable[[int], None] | None) -> Any:
    """Wait for all results, and report progress meanwhile."""
    while progress is not None:
        finished = answers.ready()  # read before the count, so that the last report includes the last task
        with done.get_lock():
            count, done.value = done.value, 0
        progress(count)
        if finished:
            break
        answers.wait(_PROGRESS_EVERY_S)
    return answers.get()


@contextmanager
def _single_threaded_children() -> Iterator[None]:
    """Limit processes started in this block to one thread for linear algebra, since there is one process per core.

    With more threads than cores they wait for each other, and a fit of milliseconds takes ten times as long.
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


def _start_worker(work: Callable[[Any], Any], done: Any) -> None:
    def add(count: int) -> None:
        with done.get_lock():
            done.value += count

    _work[:] = [work]
    _listeners[:] = [add]


def _run_task(task: Any) -> Any:
    return _work[0](task)
