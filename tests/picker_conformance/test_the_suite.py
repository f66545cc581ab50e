"""The suite itself: it passes the reference picker, and fails each broken one where it should."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import pytest

from . import (
    test_destination,
    test_health,
    test_refusal,
    test_request_body,
    test_response,
    test_stream,
    test_subset,
)
from .broken_pickers import MUTANTS, Test
from .reference import mutants as m
from .reference.picker import HEALTH, SERVING, Picker, serve
from .requirement import Source
from .target import Target

HERE = Path(__file__).parent
MODULES = (test_destination, test_health, test_refusal, test_request_body, test_response, test_stream, test_subset)
ENDPOINTS = ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
MODEL, LIMITED, LARGEST = "llama", "Bearer limited", 1 << 19


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop of the pickers, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def started(loop: asyncio.AbstractEventLoop) -> Iterator[Callable[..., Target]]:
    """Start a picker, with a second one that has no endpoints."""
    stops, targets = [], []

    def start(kind: type[Picker] = Picker, states: Mapping[str, int] = HEALTH) -> Target:
        ports = []
        for endpoints in (ENDPOINTS, []):
            picker = kind(endpoints, MODEL, LARGEST, LIMITED)
            serving = serve(picker, "127.0.0.1:0", states)
            server, port = asyncio.run_coroutine_threadsafe(serving, loop).result()
            ports.append(f"127.0.0.1:{port}")
            stops.append(server.stop)
        target = Target(ports[0], MODEL, endpoints=tuple(ENDPOINTS), limit_s=0.15, max_body_bytes=LARGEST)
        target.empty, target.shed_headers = (ports[1], MODEL), (("authorization", LIMITED),)
        targets.append(target)
        return target

    yield start
    for target in targets:
        target.close()
    for stop in stops:
        asyncio.run_coroutine_threadsafe(stop(None), loop).result()


def fails(test: Test, target: Target) -> bool:
    """Whether a test fails with any of its parameters."""
    marks = [mark.args for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    for values in itertools.product(*(values for _, values in marks)):
        try:
            test(target, **dict(zip((name for name, _ in marks), values, strict=True)))
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_picker_fails(name: str, started: Callable[..., Target]) -> None:
    kind, tests = MUTANTS[name]
    target = started(kind)
    assert [test.__name__ for test in tests if not fails(test, target)] == []


@pytest.mark.parametrize(
    ("states", "tests"),
    [
        ({"": 2}, [test_health.test_serving, test_health.test_whole_server]),
        ({"no.such.Service": SERVING}, [test_health.test_unknown_service]),
    ],
    ids=["not serving", "all names serve"],
)
def test_a_wrong_health_service_fails(
    states: dict[str, int], tests: list[Test], started: Callable[..., Target]
) -> None:
    target = started(Picker, states)
    assert [test.__name__ for test in tests if not fails(test, target)] == []


def test_a_picker_may_rewrite_bodies_if_it_says_so(started: Callable[..., Target]) -> None:
    target = started(m.Rewriting)
    assert fails(test_request_body.test_pieces, target)
    target.rewrites_body = True
    assert not fails(test_request_body.test_pieces, target)
    assert not fails(test_request_body.test_content_length, target)


def test_a_picker_may_leave_answers_alone(started: Callable[..., Target]) -> None:
    target = started(m.Leaving)
    assert not fails(test_stream.test_cancelled, target)
    for test in (test_response.test_body, test_response.test_each_event_at_once, test_response.test_served_endpoint):
        with pytest.raises(pytest.skip.Exception):
            fails(test, target)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_picker_may_speak_tls(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    made, key = tmp_path / "picker.crt", tmp_path / "picker.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=picker"
    names = ["-addext", "subjectAltName=DNS:picker", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), made.read_bytes())])
    serving = serve(Picker(ENDPOINTS, MODEL), "127.0.0.1:0", HEALTH, credentials)
    server, port = asyncio.run_coroutine_threadsafe(serving, loop).result()
    target = Target(f"127.0.0.1:{port}", MODEL, made.read_bytes(), "picker")
    target.connect()
    assert not fails(test_destination.test_header, target)
    assert not fails(test_health.test_serving, target)
    target.close()
    with pytest.raises(pytest.UsageError, match="in clear text"):
        Target(target.address, MODEL, limit_s=0.3).connect()
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result()


def suite() -> dict[str, Test]:
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": test
        for module in MODULES
        for name, test in inspect.getmembers(module, inspect.isfunction)
        if name.startswith("test_")
    }


def test_each_test_can_fail() -> None:
    failing = {test for _, tests in MUTANTS.values() for test in tests}
    untried = {name for name, test in suite().items() if test not in failing}
    assert {name for name in untried if not name.startswith("test_health.")} == set()


def requirements() -> str:
    """Return the requirements as tables, by source."""
    lines = []
    for source in Source:
        lines += [f"### {source}", "", "| | requirement | test |", "|---|---|---|"]
        for name, test in suite().items():
            (requirement,) = (mark.args[0] for mark in getattr(test, "pytestmark", []) if mark.name == "requirement")
            if requirement.source == source:
                lines.append(f"| {requirement.strength} | {requirement.sentence} | `{name}` |")
        lines.append("")
    return "\n".join(lines)


def test_the_readme_has_all_requirements() -> None:
    assert requirements() in (HERE / "README.md").read_text("utf-8"), f"expected in README.md:\n{requirements()}"


def run(folder: Path, target: Target, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the suite by itself, in a folder outside any project."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder), "--target", target.address]
    return subprocess.run(
        [*command, "--model", MODEL, *arguments],
        cwd=folder.parent,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE, tmp_path / "picker_conformance", ignore=shutil.ignore_patterns("__pycache__")))


def test_the_reference_conforms(started: Callable[..., Target], copied: Path, tmp_path: Path) -> None:
    target, report = started(), tmp_path / "report.json"
    told = ["--endpoints", ",".join(ENDPOINTS), "--empty-target", target.empty[0] if target.empty else ""]
    limits = ["--shed-header", f"authorization={LIMITED}", "--max-body-bytes", str(LARGEST), "--time-limit", "30"]
    result = run(copied, target, *told, *limits, "--conformance-report", str(report))
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())["requirements"]
    assert {each["result"] for each in found} == {"met"}, result.stdout
    assert len(found) == len(suite())


def test_what_is_advised_is_told_and_fails_no_run(started: Callable[..., Target], copied: Path) -> None:
    target = started(MUTANTS["one large piece"][0])
    result = run(copied, target, "-k", "test_size_of_pieces or test_no_endpoint or test_header")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"SHOULD NOT MET .*64 KiB", result.stdout)
    assert "give --empty-target or --empty-model" in result.stdout
