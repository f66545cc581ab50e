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
from .reference import mutants as m
from .reference.picker import HEALTH, SERVING, Picker, serve
from .requirement import Source
from .target import FOREIGN, Target

HERE = Path(__file__).parent
MODULES = (test_destination, test_health, test_refusal, test_request_body, test_response, test_stream, test_subset)
ENDPOINTS = ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
MODEL, LIMITED, LARGEST = "llama", "Bearer limited", 1 << 19

Test = Callable[..., object]

MUTANTS: dict[str, tuple[type[Picker], list[Test]]] = {
    "only in the metadata": (
        m.says_wrongly("request_headers", lambda said: said.request_headers.response.ClearField("header_mutation")),
        [test_destination.test_header],
    ),
    "in value": (m.says_wrongly("request_headers", m.in_value), [test_destination.test_header]),
    "only in the header": (
        m.says_wrongly("request_headers", lambda said: said.ClearField("dynamic_metadata")),
        [test_destination.test_metadata],
    ),
    "header and metadata differ": (
        m.says_wrongly("request_headers", lambda said: said.dynamic_metadata.update({"envoy.lb": {}})),
        [test_destination.test_header_and_metadata_are_equal],
    ),
    "names of hosts": (m.destination(lambda value: "vllm-0:8000"), [test_destination.test_syntax]),
    "spaces": (m.destination(lambda value: value.replace(",", ", ")), [test_destination.test_syntax]),
    "IPv6 without brackets": (m.destination(lambda value: "fd00::1:8000"), [test_destination.test_syntax]),
    "an endpoint twice": (
        m.destination(lambda value: f"{value},{value}"),
        [test_destination.test_no_endpoint_comes_twice],
    ),
    "an endpoint of no pool": (
        m.destination(lambda value: FOREIGN),
        [
            test_destination.test_pool,
            test_destination.test_many_at_once,
            test_destination.test_client_does_not_choose,
            test_subset.test_no_subset,
        ],
    ),
    "the client's destination stays": (
        m.says_wrongly("request_headers", lambda said: setattr(m.header(said), "append_action", m.ADD_IF_ABSENT)),
        [test_destination.test_client_does_not_choose],
    ),
    "one place for all bodies": (m.OneBody, [test_destination.test_many_at_once]),
    "its side stays open": (
        m.StaysOpen,
        [test_destination.test_end_of_the_stream, test_stream.test_ended, test_stream.test_without_bodies_of_answers],
    ),
    "no subset": (
        m.WithoutSubset,
        [
            test_subset.test_exact,
            test_subset.test_partly_known,
            test_subset.test_fallbacks,
            test_subset.test_none_known,
            test_subset.test_empty,
            test_subset.test_without_a_body,
            test_subset.test_text,
        ],
    ),
    "a fallback outside the subset": (
        m.destination(lambda value: f"{value},10.0.0.2:8000"),
        [test_subset.test_exact, test_subset.test_fallbacks],
    ),
    "an empty subset is none": (m.EmptyIsAll, [test_subset.test_empty]),
    "nothing without a subset": (m.OnlySubset, [test_subset.test_no_subset]),
    "all errors are 500": (
        m.says_wrongly("immediate_response", lambda said: setattr(said.immediate_response.status, "code", 500)),
        [
            test_subset.test_none_known,
            test_refusal.test_no_endpoint,
            test_refusal.test_dropped,
            test_refusal.test_invalid_json,
            test_refusal.test_no_object,
            test_refusal.test_unknown_model,
            test_refusal.test_too_large,
        ],
    ),
    "errors without words": (
        m.says_wrongly("immediate_response", lambda said: said.immediate_response.ClearField("body")),
        [test_refusal.test_message],
    ),
    "silent after an error": (m.DeadAfterAnError, [test_refusal.test_after_an_error]),
    "headers are ignored until there is a body": (m.OneHead, [test_refusal.test_out_of_order]),
    "a byte of the request is lost": (
        m.says_wrongly("request_body", m.loses_a_byte),
        [
            test_request_body.test_pieces,
            test_request_body.test_single_bytes,
            test_request_body.test_long,
            test_request_body.test_content_length,
            test_request_body.test_empty_end,
            test_request_body.test_late_body,
        ],
    ),
    "a body that is not streamed back": (
        m.says_wrongly("request_body", lambda said: said.request_body.response.ClearField("body_mutation")),
        [test_request_body.test_pieces],
    ),
    "pieces are decoded": (m.hears_wrongly("request_body", m.replaces_halves), [test_request_body.test_single_bytes]),
    "one large piece": (type("Large", (Picker,), {"largest_piece": 1 << 30}), [test_request_body.test_size_of_pieces]),
    "a wrong content-length": (
        m.says_wrongly("request_headers", m.wrong_length),
        [test_request_body.test_content_length],
    ),
    "an empty end is ignored": (
        m.deaf_to("request_body", lambda heard: not heard.request_body.body),
        [test_request_body.test_empty_end],
    ),
    "trailers are ignored": (m.deaf_to("request_trailers"), [test_request_body.test_trailers]),
    "the body ends before the trailers": (
        m.says_wrongly("request_body", lambda said: setattr(m.streamed(said), "end_of_stream", True)),
        [test_request_body.test_trailers],
    ),
    "all requests have a body": (
        m.hears_wrongly("request_headers", lambda heard: setattr(heard.request_headers, "end_of_stream", False)),
        [test_request_body.test_without_a_body, test_subset.test_without_a_body, test_response.test_after_a_get],
    ),
    "two ends": (m.TwoEnds, [test_request_body.test_end_comes_twice]),
    "a byte of the answer is lost": (
        m.says_wrongly("response_body", m.loses_a_byte),
        [
            test_response.test_served_endpoint,
            test_response.test_body,
            test_response.test_long,
            test_response.test_events_in_pieces,
            test_response.test_error,
            test_response.test_after_a_get,
        ],
    ),
    "answers are buffered": (m.Buffering, [test_response.test_each_event_at_once]),
    "unknown endpoints get no answer": (
        m.deaf_to("response_headers", lambda heard: FOREIGN in str(heard.metadata_context)),
        [test_response.test_served_endpoint],
    ),
    "answers without a body are ignored": (
        m.deaf_to("response_headers", lambda heard: heard.response_headers.end_of_stream),
        [test_response.test_without_a_body, test_response.test_without_a_request],
    ),
    "an empty piece of the answer is ignored": (
        m.deaf_to("response_body", lambda heard: not heard.response_body.body),
        [test_response.test_empty, test_response.test_body],
    ),
    "trailers of the answer are ignored": (m.deaf_to("response_trailers"), [test_response.test_trailers]),
    "the answer ends before its trailers": (
        m.says_wrongly("response_body", lambda said: setattr(m.streamed(said), "end_of_stream", True)),
        [test_response.test_trailers],
    ),
    "streams leak": (m.Leaking, [test_stream.test_cancelled, test_stream.test_ended, test_stream.test_many_cancelled]),
    "protocol_config is missed": (
        m.deaf_to("request_headers", lambda heard: not heard.HasField("protocol_config")),
        [test_stream.test_without_protocol_config],
    ),
    "observers are answered": (m.AnswersObservers, [test_stream.test_observability_mode]),
}
"""Broken pickers, with the tests that must fail."""


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
        target = Target(ports[0], MODEL, tuple(ENDPOINTS), limit_s=0.15, max_body_bytes=LARGEST)
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
