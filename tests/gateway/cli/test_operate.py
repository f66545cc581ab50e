"""The verbs of an operator, on a running gateway."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from gateway.cli import admin
from gateway.cli.admin import Admin
from gateway.cli.app import app
from gateway.reload.reloader import ReloadError
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, start_gateway

METHODS = {"plain": "baseline", "lookup": "ngram"}


async def gateway(running: Running, *line: str, url: str = "", key: str = ADMIN_KEY) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command."""
    result = await running.command(*line, url=url, key=key)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
async def test_draining_and_resuming_a_replica() -> None:
    async with start_gateway(METHODS, {"name": "learned", "seed": 0}) as running:
        status, said, warned = await gateway(running, "drain", "lookup", "--wait")
        assert (status, warned) == (0, "")
        assert f"{MODEL}/lookup is draining; 0 requests" in said
        assert {(await running.chat()).headers["x-gateway-backend"] for _ in range(4)} == {"plain"}
        _, said, _ = await gateway(running, "status")
        lines = [line.split() for line in said.splitlines()]
        assert ["lookup", "ngram", "5", "draining", "0", "0", "-", "0", "-"] in lines
        assert "lookup: drained by an operator" in said
        _, said, _ = await gateway(running, "explain", "hi", "--temperature", "0")
        assert "plain would take this request: learned" in said
        assert "    draining: drained by an operator" in said.splitlines()
        _, said, warned = await gateway(running, "drain", f"{MODEL}/plain")
        assert f"`gateway resume {MODEL}/plain`" in said
        assert f"no other replica of {MODEL} is up" in warned
        _, said, _ = await gateway(running, "explain", "hi")
        assert said.startswith("No replica would take this request: ")
        status, said, _ = await gateway(running, "explain", "hi", "--json")
        assert (status, json.loads(said)["choice"]) == (0, None)
        await gateway(running, "resume", "lookup")
        await running.until_up("lookup")
        document = json.loads((await gateway(running, "status", "--json"))[1])
        assert [each["name"] for each in document["models"][0]["backends"]] == [*METHODS]


def test_waiting_for_a_replica_ends_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"a": {"state": "up"}, "b": {"state": "recovering"}}
    pools = iter([{"models": {"m": {"backends": backends}}}, {"models": {}}])
    monkeypatch.setattr(Admin, "get", lambda *_: next(pools))
    monkeypatch.setattr(Admin, "post", lambda *_, **__: {"state": "draining", "in_flight": 1, "others": 2})
    result = CliRunner().invoke(app, ["drain", "a", "--wait"])
    assert (result.exit_code, result.exception) == (0, None)
    assert "3 requests in flight there finish" in result.stdout
    assert "no other replica" not in result.stderr, "b serves"


def test_waiting_for_a_replica_fails_if_somebody_resumes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = {"models": {"m": {"backends": {"a": {"state": "up", "in_flight": 0, "others": 0}}}}}
    monkeypatch.setattr(Admin, "get", lambda *_: resumed)
    monkeypatch.setattr(Admin, "post", lambda *_, **__: {"state": "draining", "in_flight": 1, "others": 2})
    result = CliRunner().invoke(app, ["drain", "a", "--wait"])
    assert (result.exit_code, "m/a is up: somebody resumed it" in result.stderr) == (1, True)


async def test_reload_says_what_changed_and_what_is_refused() -> None:
    async with start_gateway(METHODS) as running:

        async def change(*, dry_run: bool, trial: object = None) -> list[str]:
            if dry_run:
                return ["models.m.policy: changed"]
            raise ReloadError("refused", "server.port: 1 -> 2 needs a restart")

        assert "was not started with a pool file" in (await gateway(running, "reload"))[2]
        running.gateway.reload = change
        assert await gateway(running, "reload", "--dry-run") == (
            0,
            "models.m.policy: changed\n1 change, not made\n",
            "",
        )
        status, said, _ = await gateway(running, "reload", "--dry-run", "--json")
        assert (status, json.loads(said)) == (0, {"dry_run": True, "changes": ["models.m.policy: changed"]})
        status, _, error = await gateway(running, "reload")
        assert (status, error) == (1, "Nothing was changed: server.port: 1 -> 2 needs a restart\n")


WRONG = [
    (("drain", "lookpu"), {}, "There is no replica lookpu; did you mean lookup?"),
    (("resume", "x"), {}, f"There is no replica x; there are: {MODEL}/plain, {MODEL}/lookup"),
    (("explain", "hi", "--model", "llama"), {}, "The model `llama` does not exist here"),
    *(((verb, *rest), {"key": "wrong"}, "this key is not accepted; give admin.key") for verb, *rest in (
        ("status",), ("drain", "plain"), ("resume", "plain"), ("reload",), ("explain", "hi"))),
    (("status",), {"key": ""}, "a key is needed; give admin.key"),
    (("status",), {"url": "http://127.0.0.1:9"}, "cannot be reached"),
    (("status",), {"url": "an engine"}, "answered without 'process'"),
    (("drain", "plain"), {"url": "an engine"}, "answered without 'models': it is no gateway"),
]  # fmt: skip


@pytest.mark.slow
async def test_what_goes_wrong_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with start_gateway(METHODS) as running:
        for line, how, message in WRONG:
            url = running.upstreams["plain"].url if how.get("url") == "an engine" else how.get("url", "")
            status, printed, error = await gateway(running, *line, url=url, key=how.get("key", ADMIN_KEY))
            assert (status, printed, error.count("\n")) == (1, "", 1), (line, error)
            assert message in error, line
        with pytest.raises(typer.Exit):
            await asyncio.to_thread(Admin(running.url, ADMIN_KEY).get, "/admin/of-tomorrow")
        assert "does not know /admin/of-tomorrow: it is no gateway, or older" in capsys.readouterr().err


def test_a_command_that_waits_outlasts_a_restart_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.Response(200, json={"a": 1})
    outcomes: list[httpx.Response | Exception] = [httpx.ConnectError("no"), httpx.RemoteProtocolError("cut"), answer]

    def request(*_: object, **__: object) -> httpx.Response:
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(httpx, "request", request)
    monkeypatch.setattr(admin, "_PAUSE_S", 0.0)
    assert Admin("http://gateway", "", patience_s=60.0).get("/admin/pool") == {"a": 1}
    outcomes.append(httpx.ConnectError("no"))
    with pytest.raises(typer.Exit):
        Admin("http://gateway", "").get("/admin/pool")


@pytest.mark.parametrize("body", ["{", "none.json"])
def test_a_request_that_cannot_be_read_is_wrong_usage(body: str, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    if body == "{":
        path.write_text(body)
    result = CliRunner().invoke(app, ["explain", str(path)])
    assert result.exit_code == 2
    assert str(path) in result.stderr


def commands(command: Any, *names: str) -> list[tuple[str, ...]]:
    children = getattr(command, "commands", {})
    return [names] if not children else [line for name in children for line in commands(children[name], *names, name)]


@pytest.mark.slow
def test_every_command_has_short_help_and_an_example() -> None:
    for names in commands(typer.main.get_command(app)):
        result = CliRunner().invoke(app, [*names, "-h"])
        assert result.exit_code == 0
        if names[0] not in {"init", "check", "schema", "import"}:
            assert re.search(rf"^  gateway {' '.join(names)}\b", result.stdout, re.MULTILINE), names
    top = CliRunner().invoke(app, ["-h"], terminal_width=80).stdout
    assert [line for line in top.splitlines() if line.endswith(":") and line[0] != " "] == [
        "Options:", "Serve:", "Operate:", "Measure and plan:"
    ]  # fmt: skip
