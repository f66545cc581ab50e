"""A policy that fails costs no request: requests are routed by load, with a log entry and a metric."""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from backends.backend import Candidate
from policies import policy
from policies.features.request import RequestFeatures
from policies.policy import Assessment, Decision, Outcome, Policy, PolicySettings
from policies.roles import Explainer, Learner, Maintained, Work
from tests.gateway.conftest import ADMIN, MODEL, Start
from tests.support.paths import ROOT


class BrokenSettings(PolicySettings):
    breaks: tuple[str, ...]


class Broken(Policy, Learner, Explainer, Maintained):
    """A policy that raises in the given methods, or chooses an unknown backend."""

    name = "broken"

    Settings = BrokenSettings
    settings: BrokenSettings

    def __init__(self, settings: BrokenSettings) -> None:
        super().__init__(settings)
        self.breaks = settings.breaks

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        self._may_break("choose")
        return Decision("nowhere" if "nowhere" in self.breaks else candidates[0].name, self.name, "first")

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        self._may_break("assess")
        return [Assessment(candidate.name, None, "") for candidate in candidates]

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        return self.choose(request, candidates)

    def _may_break(self, call: str) -> None:
        if call in self.breaks:
            raise LookupError(call)

    def observe(self, outcome: Outcome) -> None:
        self._may_break("observe")

    def maintenance(self) -> Work | None:
        self._may_break("maintenance")
        return None


def broken(*breaks: str) -> dict[str, Any]:
    return {"name": Broken.name, "breaks": breaks}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policy._REGISTRY, Broken.name, Broken)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["choose", "nowhere"])
async def test_requests_of_a_failing_policy_are_routed_by_load(
    gateway_of: Start, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_of(policy=broken(how)) as running:
        running.backend("a").in_flight = 7
        answers = [await running.chat() for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
        routes = {(answer.headers["x-gateway-backend"], answer.headers["x-gateway-policy"]) for answer in answers}
        assert routes == {("b", "least_loaded")}
        assert {answer.headers["x-gateway-reason"] for answer in answers} == {"policy_failed"}
        (record,) = (entry for entry in caplog.records if "policy broken failed in choose" in entry.getMessage())
        assert record.levelno == logging.ERROR
        assert record.exc_info
        while await running.counted("gateway_policy_errors_total", call="choose") < 3:  # updated twice a second
            await asyncio.sleep(0)
        decisions = {"policy": "least_loaded", "reason": "policy_failed"}
        assert await running.counted("gateway_decisions_total", **decisions) == 3


@pytest.mark.slow
async def test_a_policy_that_fails_in_observe_does_not_affect_answers(gateway_of: Start) -> None:
    keys = [{"name": "one", "key": "sk-one", "max_in_flight": 1}]
    async with gateway_of(policy=broken("observe", "maintenance"), keys=keys) as running:
        for stream in (False, True, False):
            # The second would be refused if the first still counted as in flight.
            answer = await running.chat(stream=stream, headers={"authorization": "Bearer sk-one"})
            assert answer.status_code == 200
        for call, failures in (("maintenance", 2), ("observe", 3)):  # the first is retried
            while await running.counted("gateway_policy_errors_total", call=call) < failures:
                await asyncio.sleep(0)
        assert running.gateway.relay.exchanges == set()


async def test_explain_reports_that_the_policy_failed(gateway_of: Start) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with gateway_of(policy=broken("assess")) as running:
        response = await running.client.post("/admin/explain", json=body, headers=ADMIN)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "policy_failed"
    async with gateway_of(policy=broken("choose")) as running:
        assert (await running.explain())["choice"]["reason"] == "policy_failed"


async def test_any_other_defect_is_answered_with_500(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_of() as running:

        def defect(*_: object, **__: object) -> None:
            raise AttributeError("a defect of the gateway")

        with monkeypatch.context() as patched:
            # The class is not compiled by mypyc, whose classes cannot be patched.
            patched.setattr(Policy, "prices_limits", property(defect))
            answer = await running.chat()
            patched.setattr(Policy, "text_features", property(defect))
            early = await running.chat()
        for response in (answer, early):
            assert (response.status_code, response.json()["error"]["code"]) == (500, "gateway_failed")
        assert sum("could not be sent on" in message for message in caplog.messages) == 2
        assert (await running.chat()).status_code == 200
        assert running.gateway.relay.exchanges == set()
        assert running.gateway.models[MODEL].traffic.in_flight == 0


HOOKS = {
    "choose",
    "observe",
    "observe_shadow",
    "maintenance",
    "assess",
    "preview",
    "forget",
    "take_over",
    "engine_changed",
    "sent_elsewhere",
    "evicted",
    "correct",
    "price",
}
OWNERS = {"policy", "learner", "explainer", "maintained", "heir", "informed"}


def unguarded(node: ast.AST, guarded: bool = False) -> Iterator[str]:
    """Yield the calls of a policy's methods that no `except Exception` surrounds."""
    if isinstance(node, ast.Try):
        catches = any(isinstance(each.type, ast.Name) and each.type.id == "Exception" for each in node.handlers)
        for statement in node.body:
            yield from unguarded(statement, guarded or catches)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            yield from unguarded(part, guarded)
        return
    if isinstance(node, ast.Call) and not guarded:
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        of_policy = owner.rpartition(".")[2] in OWNERS or called in {"assess", "preview", "model.observe"}
        if name in HOOKS and of_policy:
            yield f"{node.lineno}: {called}"
    for child in ast.iter_child_nodes(node):
        yield from unguarded(child, guarded)


@pytest.mark.slow
def test_every_call_of_a_policy_in_the_gateway_is_guarded() -> None:
    found = {
        str(path.relative_to(ROOT)): calls
        for path in (ROOT / "gateway").rglob("*.py")
        if (calls := list(unguarded(ast.parse(path.read_text()))))
    }
    assert found == {}
