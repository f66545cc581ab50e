"""Rules, pins and the guardrail: gateways and the command `gateway policy`."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from backends.backend import Candidate
from benchmarks.metrics_page import total
from gateway.admin import policy_versions
from gateway.admin.policy_versions import settings_of
from gateway.dialects.errors import GatewayError
from gateway.state import sync
from policies.learned.known import Known
from policies.learned.thresholds import NothingLearnedError
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.gateway.reload.test_change import change
from tests.support.blocks import play_blocks

LEARNED = {"name": "learned", "seed": 0}
GUARDED = {"name": "thresholds", "guardrail": {"share": 0.01}, "outlier_ejection": True}


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronise gateways ten times a second."""
    monkeypatch.setattr(sync, "PERIOD_S", 0.1)


@pytest.fixture
def state(tmp_path: Path) -> dict[str, str]:
    """Return the section `state` of the pool file."""
    return {"file": str(tmp_path / "state.sqlite")}


@contextlib.asynccontextmanager
async def learning(state: Any, policy: dict[str, Any] = LEARNED) -> AsyncIterator[Running]:
    async with start_gateway({"a": "baseline", "b": "ngram"}, policy, state=state) as running:
        yield running


async def ask(running: Running, times: int = 1) -> list[str]:
    """Return the policy that decided on each request."""
    return [(await running.chat()).headers["x-gateway-policy"] for _ in range(times)]


async def output_of(running: Running, *arguments: str) -> str:
    result = await running.command("policy", *arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


async def failure_of(running: Running, *arguments: str) -> str:
    result = await running.command("policy", *arguments)
    assert result.exit_code == 1
    assert not result.stdout
    return str(result.stderr)


def learned(running: Running) -> Any:
    return running.gateway.models[MODEL].policy


def pinned_text(running: Running) -> str:
    return running.gateway.policy_versions[MODEL].pin().rules


@pytest.mark.slow
async def test_a_pin_applies_to_all_gateways_and_survives_a_restart(state: Any) -> None:
    async with learning(state) as one, learning(state) as two:
        assert set(await ask(one, 8)) == {"learned"}
        learning_still = await output_of(one, "show")
        assert "learned decides" in learning_still
        assert re.search("no workload, .* in flight on one", learning_still), "each kind of request, and where it goes"
        text = await output_of(one, "distill")
        assert (await output_of(one, "show", "1")) == text
        assert "rules, version 1 decides" in await output_of(two, "pin", "1"), "distilled by the other gateway"
        await one.until(lambda: learned(one).pinned is not None)
        assert await ask(one) == await ask(two) == ["thresholds"]
        pinned = learned(one).pinned
        assert pinned.settings == settings_of(text)
    async with learning(state) as restarted:
        before = learned(restarted).statistics.observations
        assert before, "what was learned is known before the first request"
        assert await ask(restarted, 3) == ["thresholds"] * 3
        assert learned(restarted).statistics.observations > before, "it continues to learn"
        assert "version 1 of" in (shown := await output_of(restarted, "show"))
        assert ", pinned" in shown
        assert "learned decides" in await output_of(restarted, "unpin")
        assert await ask(restarted) == ["learned"]
        assert learned(restarted).known.per_step.groups, "what was stored is part of the table"


@pytest.mark.slow
async def test_versions_are_shown_pinned_and_rolled_back(state: Any) -> None:
    async with learning(state) as running:
        assert "m has nothing to go back to" in await failure_of(running, "rollback")
        await ask(running, 4)
        first = await output_of(running, "distill")
        await ask(running, 3)
        second = await output_of(running, "distill")
        assert first != second
        assert await output_of(running, "show", "1") == first
        assert await output_of(running, "show", "2") == second
        await output_of(running, "pin", "1")
        assert "learned decides" in await output_of(running, "rollback")
        assert await ask(running) == ["learned"]
        assert "version 1 decides" in await output_of(running, "rollback"), "a second time goes forward again"
        await output_of(running, "pin", "2")
        assert pinned_text(running) == second
        assert "version 1 decides" in await output_of(running, "rollback")
        assert (await ask(running), pinned_text(running)) == (["thresholds"], first)
        listed = re.findall(r"^m: version (\d) of .* UTC(.*)$", await output_of(running, "list"), re.MULTILINE)
        assert listed == [("1", ", pinned"), ("2", "")]
        lines = (await output_of(running, "diff", "1", "2")).splitlines()
        assert lines[:2] == ["--- version 1", "+++ version 2"]
        assert {line[1:] for line in lines[2:] if line[0] == "+"} == {*second.splitlines()} - {*first.splitlines()}
        assert await output_of(running, "diff", "2", "2") == "They are the same.\n"
        shown = orjson.loads(await output_of(running, "show", "--json"))["models"][MODEL]
        assert (shown["pinned"], len(shown["versions"])) == (1, 2)
        assert orjson.loads(await output_of(running, "show", "2", "--json"))["text"] == second


@pytest.mark.slow
async def test_impossible_commands_fail_with_a_message(state: Any) -> None:
    async with learning(state) as running:
        assert "no request was observed yet" in await failure_of(running, "distill")
        assert "no rules for m yet" in await failure_of(running, "show", "1")
        assert "no rules yet" in await output_of(running, "show")
        await ask(running, 2)
        await output_of(running, "distill")
        assert "There is no version 7 of the rules for m; kept: 1." in await failure_of(running, "pin", "7")
        await output_of(running, "pin", "1")
        assert "version 1 pinned already" in await failure_of(running, "pin", "1")
        pinned = learned(running).pinned
        broken = '{"version": 2, "rules": "name: thresholds\\nrules: [{name: x, prefer: [nonsense]}]"}'
        await running.gateway.state.documents.put(f"{MODEL}/pin", broken, after=1)
        assert learned(running).pinned is pinned, "an invalid pin changes nothing"
        await running.gateway.state.documents.put(f"{MODEL}/pin", "no JSON", after=2)
        assert "learned decides" in await output_of(running, "show")
        assert "version 1 decides" in await output_of(running, "pin", "1"), "which mends it"
        assert "There is no model x" in await failure_of(running, "distill", "--model", "x")


@pytest.mark.slow
async def test_nothing_can_be_pinned_without_a_store() -> None:
    async with learning("none") as running:
        await ask(running, 2)
        assert "`state: none`" in await failure_of(running, "distill")
        assert "gateway_state_connected{" not in (await running.client.get("/metrics")).text
        assert "this process alone" in await output_of(running, "thaw")


async def test_only_a_learned_policy_has_rules() -> None:
    async with start_gateway({"a": "baseline"}, {"name": "round_robin"}, state="none") as running:
        assert "m: round_robin, which does not learn" in await output_of(running, "show")
        assert "No model of this pool has the policy `learned`" in await failure_of(running, "distill")
        assert "m has the policy `round_robin`" in await failure_of(running, "pin", "1", "--model", MODEL)


@pytest.mark.parametrize("name", ["rules_of", "in_words"])
async def test_no_other_thread_adds_replicas_to_what_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []

    def read(known: Known, _: object) -> Any:
        found.append([*known.replicas])
        raise NothingLearnedError

    monkeypatch.setattr(policy_versions, name, read)
    async with learning("none") as running:
        versions, candidates = running.gateway.policy_versions[MODEL], list[Candidate](running.gateway.pool.of(MODEL))
        with pytest.raises((GatewayError, NothingLearnedError)):
            await (versions.distill(candidates) if name == "rules_of" else versions.kinds(candidates))
    assert found == [["a", "b"]]


async def test_a_reload_does_not_thaw_again_what_was_thawed_before(state: Any) -> None:
    async with learning(state) as running:
        before = running.gateway.models[MODEL]
        assert "thawed at all gateways" in await output_of(running, "thaw")
        assert before.guardrail is not None
        play_blocks(before.guardrail, 3.0)
        await change(running, policy={**LEARNED, "objective": "ttft"})
        after = running.gateway.models[MODEL]
        assert after.policy is not before.policy
        assert after.guardrail is not None
        assert after.guardrail.frozen
        assert "thawed at all gateways" in await output_of(running, "thaw")
        assert not after.guardrail.frozen


@pytest.mark.slow
@pytest.mark.parametrize("settings", [LEARNED, GUARDED], ids=["learned", "guarded"])
async def test_a_frozen_policy_is_shown_and_thawed_in_all_gateways(state: Any, settings: dict[str, Any]) -> None:
    async with learning(state, settings) as one, learning(state, settings) as two:
        guardrails = [found for each in (one, two) if (found := each.gateway.models[MODEL].guardrail)]
        for each in guardrails:
            play_blocks(each, 3.0)
            assert each.frozen
        detector = one.gateway.models[MODEL].detector
        for _ in range(12):
            detector.observe_speed("b", 8.0, None, time.time())
        on_page = await one.on_page()
        assert on_page["b"]["outlier"].startswith("its steps take ")
        assert on_page["b"]["slowdown"] > 2.0
        assert (on_page["a"]["outlier"], on_page["a"]["slowdown"]) == (None, 1.0)
        page = (await one.client.get("/metrics")).text
        assert f'gateway_policy_frozen{{model="{MODEL}"}} 1.0' in page
        assert f'gateway_backend_outlier_ejected{{backend="b",model="{MODEL}"}} 1.0' in page
        assert f'gateway_backend_outlier_ejected{{backend="a",model="{MODEL}"}} 0.0' in page
        shown = await output_of(one, "show")
        assert "FROZEN" in shown
        assert "as long as least_loaded" not in shown, "the comparison has started over"
        assert "b is an outlier: its steps take" in shown
        assert " outlier " in (await one.command("status")).output
        assert "thawed at all gateways" in await output_of(one, "thaw")
        await two.until(lambda: not any(each.frozen for each in guardrails))
        page = (await one.client.get("/metrics")).text
        assert f'gateway_policy_frozen{{model="{MODEL}"}} 0.0' in page
        assert f'gateway_policy_ratio_to_least_loaded{{model="{MODEL}"}} NaN' in page
        play_blocks(guardrails[0], 0.8)
        page = (await one.client.get("/metrics")).text
        ratio = total(page, "gateway_policy_ratio_to_least_loaded", model=MODEL)
        assert ratio == pytest.approx(0.8, rel=0.05)
        assert f"takes {ratio:.2f} times as long as least_loaded (95% interval " in await output_of(one, "show")
