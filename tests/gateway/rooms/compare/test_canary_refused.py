"""A canary that cannot be compared is refused before anything has happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backends.health import State
from gateway.cli.admin import Admin
from gateway.cli.app import app
from gateway.rooms.compare import canary
from tests.gateway.conftest import MODEL, start_gateway
from tests.gateway.rooms.compare.support import begin, with_state


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--replica", "x", "--with", "{}"], "no replica x; there are: m/a, m/b"),
        (["--replica", "a", "--with", "{]"], "--with is no JSON"),
        (["--replica", "a", "--with", '{"method": "suffix"}'], "--with lacks num_speculative_tokens"),
        (["--replica", "a", "--with", '{"method": "sufix", "num_speculative_tokens": 3}'], "did you mean 'suffix'?"),
        (["--replica", "a", "--with", "{}"], "no other replica that is up serves as a does"),
    ],
)
async def test_a_canary_that_cannot_be_compared_changes_nothing(options: list[str], problem: str) -> None:
    async with start_gateway() as gateway:
        result = await gateway.command("canary", *options)
        assert result.exit_code == 2, result.output
        assert problem in result.stderr
        assert gateway.backend("a").health.state is State.UP


@pytest.mark.parametrize(
    ("replica", "problem"),
    [("b", "replicas of m are being compared; end that first"), ("eagle3", "eagle3 names a replica and a method")],
)
async def test_a_canary_whose_comparison_would_be_refused_changes_nothing(
    replica: str, problem: str, tmp_path: Path
) -> None:
    methods = {"a": "eagle3", replica: "eagle3", "c": "baseline"}
    async with with_state(tmp_path, methods) as gateway:
        if replica == "b":
            await begin(gateway, b="c", a="a")
        result = await gateway.command("canary", "--replica", replica, "--with", "{}")
        assert problem in result.stderr
        assert result.exit_code == 2
        assert gateway.backend(replica).health.state is State.UP


def test_a_simulated_replica_has_no_engine_to_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    each = {"method": "baseline", "num_speculative_tokens": 0, "speculative_config": {}, "state": "up"}
    each |= {"process": "ready", "simulated": True}
    asked: list[str] = []

    def get(_: Admin, path: str) -> dict[str, Any]:
        asked.append(path)
        return {"models": {MODEL: {"backends": {"a": each, "b": each}}}}

    monkeypatch.setattr(Admin, "get", get)
    suffix = '{"method": "suffix", "num_speculative_tokens": 24}'
    result = CliRunner().invoke(app, ["canary", "--replica", "a", "--with", suffix])
    assert "a is simulated" in result.stderr
    assert asked == ["/admin/pool"], "nothing has happened"


def test_what_a_canary_waits_for_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(canary, "_POLL_S", 0.0)
    begun = {"id": "one", "began_s": 0.0}
    running = begun | {"stage": "running", "block_s": 10.0, "blocks": 0, "findings": []}
    loads = [(1, 2), (0, 2), (0, 1), (0, 0)]
    pool = [{"models": {MODEL: {"backends": {"a": {"in_flight": own, "others": too}}}}} for own, too in loads]
    ended = {"stage": "stopped", "sentence": "Nothing is known."}
    documents = [running | more for more in ({"minutes": 0.5}, {"minutes": 0.8}, {"minutes": 0.9}, ended)]
    answers = iter([*pool, *({"models": {MODEL: each}} for each in documents)])
    monkeypatch.setattr(Admin, "get", lambda *_: next(answers))
    canary._drained(Admin("", ""), MODEL, "a")
    assert "Still waiting for 2 requests at a that others have sent" in capsys.readouterr().out
    assert canary._ended(Admin("", ""), MODEL, begun) is None
    waits = f"It waits for requests: in 0.8 min none of {MODEL} has counted."
    assert capsys.readouterr().out == f"{waits}\nNothing is known.\n"
