"""Tasks on all cores of this machine, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from backends.validation import UsageError

Task = TypeVar("Task")
Answer = TypeVar("Answer")

_KNOCK_S = 5.0
_TOLD_EVERY_S = 0.25
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_work: list[Callable[[Any], Any]] = []  # of a worker process: what it was started for
_listeners: list[Callable[[int], None]] = []  # to what `tell` is told


@contextmanager
def all_cores(
    work: Callable[[Task], Answer], jobs: int | None = None, progress: Callable[[int], None] | None = None
) -> Iterator[Callable[[Sequence[Task]], list[Answer]]]:
    """Give a function that does `work` for many tasks, in processes that live until the block ends.

    Parameters
    ----------
    work
        Can be pickled; it is sent to each process once.
    jobs
        Processes; None for one on each core that this process may use, 1 for none beside this one.
    progress
        Called a few times a second with the sum of all that `tell` was told since the last call.
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
    context = multiprocessing.get_context("spawn")  # forked processes inherit locks of threads that they do not have
    done = context.Value("q")
    with _one_thread_each(), context.Pool(count, _begin, (work, done)) as pool:
        yield lambda tasks: _watched(pool.map_async(_one, tasks, chunksize=1), done, progress)
        pool.close()
        pool.join()


def tell(count: int) -> None:
    """Say, in the midst of a task, that so much more of it is done; costs a lock, so do not say it too often."""
    for listener in _listeners:
        listener(count)


def _watched(answers: Any, done: Any, progress: Callable[[int], None] | None) -> Any:
    """Wait for all answers, and tell meanwhile what was done."""
    while progress is not None:
        finished = answers.ready()  # before the count is taken: then that of the last task is in it
        with done.get_lock():
            count, done.value = done.value, 0
        progress(count)
        if finished:
            break
        answers.wait(_TOLD_EVERY_S)
    return answers.get()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let processes that are started meanwhile have one thread for linear algebra: there is one of them for each core.

    With more they wait for each other, and a fit of milliseconds takes ten times as long.
    """
    kept = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def ray_cluster(work: Callable[[Task], Answer], address: str) -> Iterator[Callable[[Sequence[Task]], list[Answer]]]:
    """Give such a function that runs on a Ray cluster, whose machines have this package installed.

    Parameters
    ----------
    address
        As `ray.init` takes it: `HOST:PORT`, `ray://HOST:PORT`, `auto`; `local` starts one on this machine.

    Raises
    ------
    UsageError
        If Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError("--ray needs Ray: pip install 'speculation-gateway[ray]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    else:
        _knock(address)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"--ray {address}: {error}") from None
    try:
        shared = ray.put(work)
        do = ray.remote(_do)
        yield lambda tasks: list(ray.get([do.remote(shared, task) for task in tasks]))
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise if nothing listens at a cluster's address: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # `auto`
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
    except OSError as error:
        raise UsageError(f"--ray {address}: nothing answers there: {error.strerror or error}") from None


def _begin(work: Callable[[Any], Any], done: Any) -> None:
    def add(count: int) -> None:
        with done.get_lock():
            done.value += count

    _work[:] = [work]
    _listeners[:] = [add]


def _one(task: Any) -> Any:
    return _work[0](task)


def _do(work: Callable[[Any], Any], task: Any) -> Any:
    return work(task)
