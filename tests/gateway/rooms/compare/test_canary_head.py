"""A canary of another head: with the same method and depth, only the configuration tells one from the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from backends.backend import Backend
from backends.health import Health, State
from backends.speculation import Method
from backends.validation import UsageError
from gateway.cli.admin import Admin
from gateway.cli.app import app
from gateway.rooms.compare import canary
from gateway.rooms.compare.definition import begun
from gateway.rooms.compare.settings import ComparisonSettings
from tests.gateway.conftest import MODEL
from tests.support.command import ADMIN_KEY, gateway_command, until, until_ready
from tests.support.paths import ROOT

ONE: dict[str, object]
OTHER: dict[str, object]
ONE, OTHER = ({"method": "eagle3", "model": f"org/{name}", "num_speculative_tokens": 3} for name in ("one", "other"))


@pytest.mark.slow
def test_another_head_is_started_and_compared(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.simulated_engine"]
    engine = {
        "method": "eagle3",
        "speculative_config": ONE,
        "serve": {"model": "org/m", "command": command, "env": {"PYTHONPATH": str(ROOT)}},
    }
    models = {"m": {"default_temperature": 1, "backends": {"a": engine, "b": engine}}}
    pool = {"models": models, "health": {"interval_s": 0.2}, "admin": {"key": ADMIN_KEY}}
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps(pool | {"state": {"file": str(tmp_path / "state.sqlite")}}))
    with gateway_command(path, tmp_path) as gateway:
        until_ready(gateway)
        admin = Admin(gateway.url, ADMIN_KEY)

        def replicas() -> dict[str, Any]:
            found: dict[str, Any] = admin.get("/admin/pool")["models"]["m"]["backends"]
            return found

        until(lambda: all(each["state"] == "up" for each in replicas().values()))
        asked = ["canary", "--replica", "b", "--url", gateway.url, "--admin-key", ADMIN_KEY, "--with"]
        refused = CliRunner().invoke(app, [*asked, json.dumps(ONE)])
        assert "b serves so already: eagle3 with 3 tokens" in refused.stderr
        reference = {"model": "m", "backend": "b"}
        members = replicas()
        assert canary._alike("b", members, (("eagle3", 3), canary._rest(OTHER))) == ["a"]
        canary._started(admin, reference, OTHER)
        tried = replicas()
        assert tried["b"]["pid"] != members["b"]["pid"]
        with pytest.raises(UsageError, match="no other replica"):
            canary._alike("b", tried, (("eagle3", 3), canary._rest(ONE)))


def test_an_engine_of_others_is_waited_for_until_it_was_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_POLL_S", 0.0)
    each = {"method": "eagle3", "num_speculative_tokens": 3, "speculative_config": {}, "in_flight": 0, "others": 0}
    states = iter(["up", "draining", "draining", "down", "down", "draining"])
    seen, told = [], []

    def get(_: Admin, path: str) -> dict[str, Any]:
        if path == "/admin/compare":
            return {"models": {}}
        seen.append(next(states))
        return {"models": {MODEL: {"backends": {"a": each | {"state": "up"}, "b": each | {"state": seen[-1]}}}}}

    def post(_: Admin, path: str, **__: Any) -> dict[str, Any]:
        told.append((path, seen[-1]))
        if path == "/admin/compare/start":
            raise typer.Exit(1)
        return {}

    monkeypatch.setattr(Admin, "get", get)
    monkeypatch.setattr(Admin, "post", post)
    result = CliRunner().invoke(app, ["canary", "--replica", "b", "--with", json.dumps(OTHER)])
    assert result.exit_code == 1, result.output
    assert told[:2] == [("/admin/drain", "up"), ("/admin/compare/start", "draining")]
    assert seen[-3:] == ["down", "down", "draining"], "it is back"


def test_a_pod_that_comes_in_place_of_the_replica_is_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_POLL_S", 0.0)
    own = {"method": "eagle3", "num_speculative_tokens": 3, "state": "up"}
    came = own | {"method": "suffix", "num_speculative_tokens": 24}
    before = {"a": own, "b": own}
    seen = [before | {"c": came}, {"a": own}, {"a": own, "c": came | {"state": "starting"}}, {"a": own, "c": came}]
    pools = iter(seen)
    monkeypatch.setattr(Admin, "get", lambda *_: {"models": {MODEL: {"backends": next(pools)}}})
    assert canary._back(Admin("", ""), MODEL, "b", before, ("suffix", 24)) == "c"
    assert next(pools, None) is None, "only once b is gone, and c serves"


def test_a_head_that_was_found_better_is_advised_until_all_have_it() -> None:
    def head(name: str, config: dict[str, object]) -> Backend:
        return Backend(name, MODEL, Method.EAGLE3, "", 3, speculative_config=config, health=Health(State.UP))

    pool = [head("a", ONE), head("b", OTHER)]
    definition = begun(ComparisonSettings(a="a", b="b"), pool, "learned", 0.0)
    assert definition.still_holds(pool, "learned", "b")
    assert not definition.still_holds([pool[1]], "learned", "b")
    assert not definition.still_holds([head("a", OTHER), pool[1]], "learned", "b")
