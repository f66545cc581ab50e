"""Options and fixtures of the suite, and its report."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from .own_picker import own_picker
from .report import results_of, write_report
from .target import Target

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("endpoint picker")
    group.addoption("--target", metavar="HOST:PORT", help="the picker under test; the other options need it")
    group.addoption("--model", help="a model that it serves")
    group.addoption("--tls-ca", metavar="FILE", help="it speaks TLS, with a certificate of these authorities (PEM)")
    group.addoption("--tls-name", metavar="NAME", help="the name in its certificate, if not that of --target")
    group.addoption("--endpoints", metavar="IP:PORT,...", help="all endpoints of its pool")
    group.addoption("--health-target", metavar="HOST:PORT", help="its health service, if at another address")
    group.addoption("--empty-target", metavar="HOST:PORT", help="such a picker whose pool has no ready endpoint")
    group.addoption("--empty-model", help="a model without a ready endpoint")
    group.addoption(
        "--request-header", metavar="NAME=VALUE", action="append", help="sent with each request, e.g. a key"
    )
    group.addoption("--shed-header", metavar="NAME=VALUE", action="append", help="makes it drop requests with 429")
    group.addoption("--max-body-bytes", type=int, metavar="N", help="the largest request body that it takes")
    group.addoption("--rewrites-body", action="store_true", help="it changes request bodies: compare them as JSON")
    group.addoption("--time-limit", type=float, metavar="SECONDS", help="for each of its answers; default: 5")
    group.addoption("--fail-on-should", action="store_true", help="a SHOULD that is not met fails the run")


def option(config: pytest.Config, name: str) -> str:
    """Return an option, empty if it was not given; in a run of all tests this file is loaded too late for options."""
    return config.getoption(name, None) or ""


def pairs(config: pytest.Config, name: str) -> tuple[tuple[str, str], ...]:
    """Return an option of the form `NAME=VALUE`, as often as it was given."""
    values = [value.partition("=") for value in config.getoption(name, None) or ()]
    if not all(separator for _, separator, _ in values):
        raise pytest.UsageError(f"--{name.replace('_', '-')} takes NAME=VALUE")
    return tuple((key.strip().lower(), text.strip()) for key, _, text in values)


def told_target(config: pytest.Config) -> Target | None:
    """Return the picker that the options name; None if they name none."""
    address, model = option(config, "target"), option(config, "model")
    if not address:
        return None
    if not model:
        raise pytest.UsageError("--target needs --model: the name of a model that the picker serves")
    empty = option(config, "empty_target"), option(config, "empty_model")
    return Target(
        address,
        model,
        tls_ca=Path(option(config, "tls_ca")).read_bytes() if option(config, "tls_ca") else b"",
        tls_name=option(config, "tls_name"),
        endpoints=tuple(filter(None, option(config, "endpoints").split(","))),
        headers=pairs(config, "request_header"),
        health=option(config, "health_target"),
        empty=(empty[0] or address, empty[1] or model) if any(empty) else None,
        shed_headers=pairs(config, "shed_header"),
        max_body_bytes=int(option(config, "max_body_bytes") or 0),
        rewrites_body=bool(option(config, "rewrites_body")),
        limit_s=float(option(config, "time_limit") or 5.0),
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requirement(requirement): what a test of the picker conformance suite checks")
    config.addinivalue_line("markers", "slow: starts processes")
    if target := told_target(config):
        target.connect()
        target.close()


@pytest.fixture(scope="session")
def picker(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The picker under test."""
    with contextlib.ExitStack() as stack:
        target = told_target(pytestconfig)
        if target is None:
            target = stack.enter_context(own_picker(tmp_path_factory.mktemp("picker")))
        yield target
        target.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Attach its requirement to each test; keep to these where there is a target, else call them slow."""
    own = [item for item in items if item.path.is_relative_to(HERE)]
    others = []
    for item in own:
        item.user_properties += [("requirement", mark.args[0].as_texts()) for mark in item.iter_markers("requirement")]
        if not option(config, "target"):
            item.add_marker("slow")
        elif not item.user_properties:
            others.append(item)
    if others:
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the failure of a SHOULD into an expected one, unless it is to fail the run."""
    report = yield
    mark = item.get_closest_marker("requirement")
    advised = mark is not None and mark.args[0].strength == "SHOULD"
    strict = option(item.config, "fail_on_should") or not option(item.config, "target")
    if advised and report.failed and report.when == "call" and not strict:
        report.outcome = "skipped"
        report.wasxfail = "a SHOULD that is not met"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the report, in a run of this suite alone."""
    if any(not Path(argument.partition("::")[0]).resolve().is_relative_to(HERE) for argument in config.args):
        return
    target = option(config, "target") or "this project's picker"
    found = results_of(terminalreporter)
    if not found:
        return
    write_report(terminalreporter, found, target)
