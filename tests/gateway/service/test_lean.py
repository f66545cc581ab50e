"""The policy `lean` in a gateway: what it has learned is shown, written as rules, pinned and kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.state import sync
from policies.lean.policy import Lean
from policies.rules.policy import Thresholds
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, start_gateway

POLICY = {"name": "lean", "seed": 0}


async def command(running: Running, *arguments: str) -> str:
    command_line = ["policy", *arguments, "--url", running.url, "--admin-key", ADMIN_KEY]
    result = await asyncio.to_thread(CliRunner().invoke, app, command_line)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def lean(running: Running) -> Lean:
    policy = running.gateway.models[MODEL].policy
    assert isinstance(policy, Lean)
    return policy


async def decided(running: Running) -> str:
    return (await running.chat()).headers["x-gateway-policy"]


@pytest.mark.slow
async def test_what_was_learned_is_shown_written_pinned_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "PERIOD_S", 0.1)
    state, methods = {"file": str(tmp_path / "state.sqlite")}, {"a": "baseline", "b": "ngram"}
    async with start_gateway(methods, POLICY, state=state) as running:
        assert {await decided(running) for _ in range(8)} == {"lean"}
        await running.until(lambda: bool(lean(running).known.per_step.arms))
        shown = await command(running, "show")
        assert "lean decides" in shown
        assert "no workload, " in shown
        assert "in flight on one" in shown
        text = await command(running, "distill")
        assert "name: thresholds" in text
        assert "rules, version 1 decides" in await command(running, "pin", "1")
        await running.until(lambda: isinstance(lean(running).pinned, Thresholds))
        assert await decided(running) == "thresholds"
    async with start_gateway(methods, POLICY, state=state) as restarted:
        before = lean(restarted).statistics.observations
        assert before, "what was learned is known before the first request"
        assert await decided(restarted) == "thresholds"
        assert "lean decides" in await command(restarted, "unpin")
        assert await decided(restarted) == "lean"
        assert lean(restarted).known.per_step.arms, "and is part of the table"
