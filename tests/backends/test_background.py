"""Work beside the requests: what fails is logged, counted and begun again; no task is started otherwise."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends import background
from backends.background import CORE_WORK, Seldom
from gateway.gateway import rooms
from tests.support.paths import ROOT
from tests.support.waiting import eventually

PACKAGES = ("gateway", "backends", "policies", "lab")
STARTS = {"create_task", "ensure_future"}
CALLS = {"background.start", "background.keep_running", "background.guarded", "background.note"}


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    counts: list[str] = []
    monkeypatch.setattr(background, "on_failure", [counts.append])
    monkeypatch.setattr(background, "_logged", Seldom())
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.01)
    return counts


async def test_work_that_raises_is_logged_counted_and_begun_again(
    counted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise ZeroDivisionError
        await asyncio.Event().wait()

    task = background.keep_running("probes", run, of="m/a")
    await eventually(lambda: runs == 3)
    assert counted == ["probes", "probes"]
    (record,) = caplog.records  # once a minute
    assert "probes of m/a failed; it is begun again in 0.01 s" in record.getMessage()
    assert record.exc_info is not None
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert len(counted) == 2, "that it was cancelled is no failure"


def test_a_disk_that_takes_no_writes_is_a_line_without_a_traceback(
    counted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    background.note("batches", OSError(errno.EROFS, "Read-only file system", "/b/lock"), of="open/1")
    (record,) = caplog.records
    said = "batches of open/1 cannot write to /b/lock: Read-only file system; free space there, or make it writable"
    assert record.getMessage().startswith(said)
    assert (record.levelname, record.exc_info, counted) == ("WARNING", None, ["batches"])


async def test_work_outlives_that_something_it_waits_for_is_cancelled(counted: list[str]) -> None:
    waits: list[asyncio.Future[None]] = []

    async def run() -> None:
        waits.append(asyncio.get_running_loop().create_future())
        await waits[-1]

    task = background.keep_running("state", run)
    await eventually(lambda: len(waits) == 1)
    waits[0].cancel()
    await eventually(lambda: len(waits) == 2)
    assert counted == ["state"]
    waits[1].set_result(None)
    await task  # it has come to its end


async def test_work_that_fails_while_it_is_cancelled_is_not_begun_again() -> None:
    began = asyncio.Event()

    async def run() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("at the same time")

    task = background.keep_running("state", run)
    await began.wait()
    task.cancel()
    await asyncio.wait_for(asyncio.wait([task]), 5.0)
    assert task.cancelled()


async def test_work_that_is_to_stop_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 3600.0)
    stopping, failed = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        failed.set()
        raise ValueError

    task = background.keep_running("engines", run, stopping=stopping)
    await failed.wait()
    stopping.set()
    async with asyncio.timeout(30.0):
        await task


async def test_a_task_that_nobody_waits_for_is_kept_and_noted(counted: list[str]) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    background.start("dashboard", fail())
    await eventually(lambda: counted == ["dashboard"])
    handled = background.start("lab", fail(), raises=KeyError)
    with contextlib.suppress(KeyError):
        await handled
    assert counted == ["dashboard"]


def test_a_failure_that_cannot_be_counted_is_no_further_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[str] = []

    def broken(work: str) -> None:
        raise OSError

    monkeypatch.setattr(background, "on_failure", [broken, counts.append])
    with background.guarded("tick"):
        raise ValueError
    assert counts == ["tick"]


def starts(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that start tasks, but for those of a group, which raises what they raise."""
    groups = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and ast.unparse(item.context_expr) == "asyncio.TaskGroup()"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in STARTS:
            if not (isinstance(node.value, ast.Name) and node.value.id in groups):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "asyncio":
            yield from (node.lineno for alias in node.names if alias.name in STARTS | {"Task"})
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.Task":
            yield node.lineno


def kinds(tree: ast.AST) -> Iterator[str]:
    """Yield the kinds of the work that a module does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called, *arguments = [node.func, *node.args]
            if ast.unparse(called) == "partial":
                called, *arguments = arguments
            if ast.unparse(called) in CALLS:
                yield from (str(each.value) for each in arguments[:1] if isinstance(each, ast.Constant))


@pytest.mark.slow
def test_tasks_are_started_by_one_module_and_the_kinds_of_work_are_those_that_are_declared() -> None:
    own = Path(background.__file__)
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    trees = {path: ast.parse(path.read_text("utf-8")) for path in paths}
    found = {str(path.relative_to(ROOT)): lines for path, tree in trees.items() if (lines := [*starts(tree)])}
    found.pop(str(own.relative_to(ROOT)))
    assert found == {}, "start tasks with backends.background, so that they do not end in silence"
    done = {kind for tree in trees.values() for kind in kinds(tree)}
    assert done == {*CORE_WORK, *(kind for room in rooms() for kind in room.work)}
