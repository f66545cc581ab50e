"""A canary on engines that the gateway starts itself: started anew, compared, and kept or started as before."""

from __future__ import annotations

import json
import subprocess
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
from gateway.rooms.compare import canary as command_line
from gateway.rooms.compare.definition import begun
from gateway.rooms.compare.settings import ComparisonSettings
from tests.gateway.conftest import MODEL
from tests.gateway.rooms.compare.support import begin, with_state
from tests.support.command import ADMIN_KEY, Command, gateway_command, until, until_ready
from tests.support.paths import ROOT
from tests.support.simulated_engine import MISSING

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CONFIG = '{"method": "suffix", "num_speculative_tokens": 24}'


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    serve = {"model": "org/m", "command": [sys.executable, "-m", "tests.support.simulated_engine"]}
    backends = {name: {"method": "baseline", "serve": serve | {"env": {"PYTHONPATH": str(ROOT)}}} for name in "ab"}
    sections = {"models": {"m": {"default_temperature": 1, "backends": backends}}, "admin": {"key": ADMIN_KEY}}
    sections |= {
        "server": {"drain_s": 3},
        "health": {"interval_s": 0.2},
        "state": {"file": str(tmp_path / "state.sqlite")},
    }
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps(sections))
    return path


def replica(command: Command, name: str) -> dict[str, Any]:
    return command.get("/admin/pool", headers=command.admin).json()["models"]["m"]["backends"][name]


def canary(command: Command, config: str) -> subprocess.Popen[str]:
    line = ["canary", "--replica", "b", "--with", config, "--url", command.url, "--admin-key", ADMIN_KEY]
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", *line, "--for", "1h"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_the_engine_is_started_anew_and_then_as_before_also_where_it_does_not_start(pool: Path, tmp_path: Path) -> None:
    with gateway_command(pool, tmp_path, "--workers", "2") as command:
        until_ready(command)
        until(lambda: replica(command, "b")["process"] == "ready")
        before = replica(command, "b")["pid"]
        trying = canary(command, CONFIG)
        until(lambda: command.get("/admin/compare", headers=command.admin).json()["models"])
        until(lambda: replica(command, "b")["state"] == "up")
        tried = replica(command, "b")
        assert (tried["method"], tried["num_speculative_tokens"]) == ("suffix", 24)
        assert (tried["speculative_config"], tried["pid"] != before) == (json.loads(CONFIG), True)
        assert replica(command, "a")["method"] == "baseline"
        served = {command.post("/v1/chat/completions", CHAT).headers["x-gateway-backend"] for _ in range(20)}
        assert served == {"a", "b"}
        assert command.post("/admin/reload", None, headers=command.admin).json()["changes"] == [], "it stays tried"
        # Of two workers, one may not know of the comparison yet.
        until(lambda: command.post("/admin/compare/stop", {"model": "m"}, headers=command.admin).status_code == 200)
        assert trying.wait(60) == 1
        assert "Its engine is started as before." in trying.communicate()[0]
        until(lambda: replica(command, "b")["state"] == "up")
        assert replica(command, "b")["method"] == "baseline"

        trying = canary(command, f'{{"method": "eagle3", "model": "{MISSING}", "num_speculative_tokens": 3}}')
        said, _ = trying.communicate(timeout=60)
        assert trying.returncode == 1
        assert "The engine of b does not start: exit status 1. It is started as before." in said
        until(lambda: all(replica(command, name)["state"] == "up" for name in "ab"))
        assert replica(command, "b")["method"] == "baseline"
        for config, why in (
            ({"method": "suffix", "num_speculative_tokens": 0}, "num_speculative_tokens: must be greater"),
            ({"method": "custom_class", "model": "os.system", "num_speculative_tokens": 2}, "only the pool file can"),
        ):
            asked = {"model": "m", "backend": "b", "speculative_config": config}
            assert why in command.post("/admin/try", asked, headers=command.admin).text


APART = {"a": "baseline", "b": "eagle3"}


@pytest.mark.parametrize(
    ("methods", "replica", "config", "problem"),
    [
        (APART, "x", "{}", "no replica x; there are: m/a, m/b"),
        (APART, "a", "{]", "--with is no JSON"),
        (APART, "a", '{"method": "suffix"}', "--with lacks num_speculative_tokens"),
        (APART, "a", '{"method": "sufix", "num_speculative_tokens": 3}', "did you mean 'suffix'?"),
        (APART, "a", "{}", "no other replica that is up serves as a does"),
        (APART | {"eagle3": "eagle3"}, "eagle3", "{}", "eagle3 names a replica and a method"),
        (APART | {"c": "eagle3"}, "b", "{}", "replicas of m are being compared; end that first"),
    ],
)
async def test_a_canary_that_cannot_be_compared_changes_nothing(
    methods: dict[str, str], replica: str, config: str, problem: str, tmp_path: Path
) -> None:
    async with with_state(tmp_path, methods) as gateway:
        if "are being compared" in problem:
            await begin(gateway, a="a", b="b")
        result = await gateway.command("canary", "--replica", replica, "--with", config)
        assert result.exit_code == 2, result.output
        assert problem in result.stderr
        assert {each.health.state for each in gateway.gateway.pool} == {State.UP}


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
    monkeypatch.setattr(command_line, "_POLL_S", 0.0)
    begun = {"id": "one", "began_s": 0.0}
    running = begun | {"stage": "running", "block_s": 10.0, "blocks": 0, "findings": []}
    loads = [(1, 2), (0, 2), (0, 1), (0, 0)]
    pool = [{"models": {MODEL: {"backends": {"a": {"in_flight": own, "others": too}}}}} for own, too in loads]
    ended = {"stage": "stopped", "sentence": "Nothing is known."}
    documents = [running | more for more in ({"minutes": 0.5}, {"minutes": 0.8}, {"minutes": 0.9}, ended)]
    answers = iter([*pool, *({"models": {MODEL: each}} for each in documents)])
    monkeypatch.setattr(Admin, "get", lambda *_: next(answers))
    command_line._drained(Admin("", ""), MODEL, "a")
    assert "Still waiting for 2 requests at a that others have sent" in capsys.readouterr().out
    assert command_line._ended(Admin("", ""), MODEL, begun) is None
    waits = f"It waits for requests: in 0.8 min none of {MODEL} has counted."
    assert capsys.readouterr().out == f"{waits}\nNothing is known.\n"


ONE: dict[str, object]
OTHER: dict[str, object]
ONE, OTHER = ({"method": "eagle3", "model": f"org/{name}", "num_speculative_tokens": 3} for name in ("one", "other"))
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3, "state": "up", "in_flight": 0, "others": 0}


def test_with_the_same_method_and_depth_the_config_tells_one_head_from_the_other() -> None:
    members = {name: EAGLE3 | {"speculative_config": ONE} for name in "ab"}
    members["a"]["state"] = "recovering"  # it serves
    one, other = ((("eagle3", 3), command_line._rest(config)) for config in (ONE, OTHER))
    assert command_line._alike("b", members, other) == ["a"]
    with pytest.raises(UsageError, match="b serves so already: eagle3 with 3 tokens"):
        command_line._alike("b", members, one)
    members["b"]["speculative_config"] = OTHER
    with pytest.raises(UsageError, match="no other replica"):
        command_line._alike("b", members, one)


def test_an_engine_of_others_is_waited_for_until_it_was_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_POLL_S", 0.0)
    states = iter(["up", "draining", "draining", "down", "down", "draining"])
    seen, told, patience = [], [], []

    def get(admin: Admin, path: str) -> dict[str, Any]:
        patience.append(admin.patience_s)
        if path == "/admin/compare":
            return {"models": {}}
        seen.append(next(states))
        return {
            "models": {
                MODEL: {
                    "backends": {
                        name: EAGLE3 | {"speculative_config": {}, "state": seen[-1] if name == "b" else "up"}
                        for name in "ab"
                    }
                }
            }
        }

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
    assert patience[0] == 0.0 < patience[-1], "the gateway may restart once it was there"


def test_a_replica_whose_engine_does_not_come_back_is_drained_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    each = EAGLE3 | {"speculative_config": {}, "process": "ready", "simulated": False}
    told: list[str] = []

    def started(_: Admin, __: dict[str, str], config: dict[str, Any] | None) -> None:
        if config is None:
            raise typer.Exit(1)

    def get(_: Admin, path: str) -> dict[str, Any]:
        return {"models": {} if path == "/admin/compare" else {MODEL: {"backends": {"a": each, "b": each}}}}

    monkeypatch.setattr(Admin, "get", get)
    monkeypatch.setattr(Admin, "post", lambda _, path, **__: told.append(path))
    monkeypatch.setattr(command_line, "_started", started)
    monkeypatch.setattr(command_line, "_ended", lambda *_: None)
    result = CliRunner().invoke(app, ["canary", "--replica", "b", "--with", json.dumps(OTHER)])
    assert result.exit_code == 1, result.output
    assert told[-2:] == ["/admin/drain", "/admin/resume"]


def test_a_model_that_a_reload_removes_ends_a_canary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Admin, "get", lambda *_: {"models": {}})
    with pytest.raises(typer.Exit):
        command_line._drained(Admin("", ""), MODEL, "a")
    assert capsys.readouterr().err == f"{MODEL} is no longer in the pool file\n"


def test_a_pod_that_comes_in_place_of_the_replica_is_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_POLL_S", 0.0)
    came = EAGLE3 | {"method": "suffix", "num_speculative_tokens": 24}
    before = {"a": EAGLE3, "b": EAGLE3}
    seen = [before | {"c": came}, {"a": EAGLE3}, {"a": EAGLE3, "c": came | {"state": "starting"}}]
    pools = iter([*seen, {"a": EAGLE3, "c": came}])
    monkeypatch.setattr(Admin, "get", lambda *_: {"models": {MODEL: {"backends": next(pools)}}})
    assert command_line._back(Admin("", ""), MODEL, "b", before, ("suffix", 24)) == "c"
    assert next(pools, None) is None, "only once b is gone, and c serves"


def test_a_head_that_was_found_better_is_advised_until_all_have_it() -> None:
    def head(name: str, config: dict[str, object]) -> Backend:
        return Backend(name, MODEL, Method.EAGLE3, "", 3, speculative_config=config, health=Health(State.UP))

    pool = [head("a", ONE), head("b", OTHER)]
    definition = begun(ComparisonSettings(a="a", b="b"), pool, "learned", 0.0)
    assert definition.still_holds(pool, "learned", "b")
    assert not definition.still_holds([pool[1]], "learned", "b")
    assert not definition.still_holds([head("a", OTHER), pool[1]], "learned", "b")
