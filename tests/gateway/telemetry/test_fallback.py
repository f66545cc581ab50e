"""A policy that fails turns nobody away: requests go by load, and the log and a metric tell of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from backends.backend import Candidate
from backends.pool import Pool
from policies.features.request import RequestFeatures
from policies.policy import Assessment, Decision, Outcome, Policy, PolicySettings, Work
from tests.gateway.conftest import ADMIN_KEY, MODEL, Start

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


class Broken(Policy):
    """Raises wherever it is told to."""

    name = "broken"

    def __init__(self, *breaks: str) -> None:
        super().__init__(PolicySettings())
        self.breaks = breaks

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        if "choose" in self.breaks:
            raise KeyError("a table that is not there")
        return Decision("nowhere" if "nowhere" in self.breaks else candidates[0].name, self.name, "first")

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        if "assess" in self.breaks:
            raise ZeroDivisionError("no mean of nothing")
        return super().assess(request, candidates)

    def observe(self, outcome: Outcome) -> None:
        if "observe" in self.breaks:
            raise TypeError("not that")

    def maintenance(self) -> Work | None:
        if "maintenance" in self.breaks:
            raise RuntimeError("cannot fit")
        return None


@pytest.mark.parametrize("how", ["choose", "nowhere"])
async def test_its_requests_go_by_load(gateway_of: Start, how: str, caplog: pytest.LogCaptureFixture) -> None:
    async with gateway_of() as running:
        running.gateway.models[MODEL].policy = Broken(how)
        running.backend("a").in_flight = 7
        answers = [await running.chat() for _ in range(3)]
        assert {one.status_code for one in answers} == {200}
        told = {(one.headers["x-gateway-backend"], one.headers["x-gateway-policy"]) for one in answers}
        assert told == {("b", "least_loaded")}
        assert {one.headers["x-gateway-reason"] for one in answers} == {"policy_failed"}
        (record,) = (one for one in caplog.records if "policy broken failed in choose" in one.getMessage())
        assert record.levelno == logging.ERROR
        assert record.exc_info
        series = 'gateway_policy_errors_total{call="choose",model="m"} 3.0'
        page = ""
        while series not in page:  # counted twice a second
            page = (await running.client.get("/metrics")).text
        assert 'gateway_decisions_total{model="m",policy="least_loaded",reason="policy_failed"} 3.0' in page


async def test_what_it_makes_of_answers_does_not_hold_them_up(gateway_of: Start) -> None:
    keys = [{"name": "one", "key": "sk-one", "max_in_flight": 1}]
    async with gateway_of(keys=keys) as running:
        model = running.gateway.models[MODEL]
        model.policy = Broken("observe", "maintenance")
        for stream in (False, True, False):
            # The second would be refused if the first were still held to be under way.
            answer = await running.chat(stream=stream, headers={"authorization": "Bearer sk-one"})
            assert answer.status_code == 200
        await running.until(lambda: model.fallback._failed["maintenance"] >= 2)  # tried again
        assert model.fallback._failed["observe"] == 3
        assert running.gateway.relay.exchanges == set()


async def test_it_cannot_be_explained_and_says_so(gateway_of: Start) -> None:
    async with gateway_of() as running:
        running.gateway.models[MODEL].policy = Broken("assess")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        told = await running.client.post("/admin/explain", json=body, headers=ADMIN)
        assert told.status_code == 500
        assert told.json()["error"]["code"] == "policy_failed"
        running.gateway.models[MODEL].policy = Broken("choose")
        told = await running.client.post("/admin/explain", json=body, headers=ADMIN)
        assert told.json()["choice"]["reason"] == "policy_failed"


async def test_any_other_defect_is_answered_alike_by_both_doors(
    gateway_of: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_of() as running:

        def defect(*_: object, **__: object) -> None:
            raise AttributeError("a slip of ours")

        with monkeypatch.context() as patched:
            # Neither is among what may be compiled, where nothing can be replaced.
            patched.setattr(Pool, "of", defect)
            answer = await running.chat()
            patched.setattr(Policy, "text_features", property(defect))
            early = await running.chat()
        for one in (answer, early):
            assert one.status_code == 500
            assert one.json()["error"]["type"] == "api_error"
            assert one.json()["error"]["code"] == "gateway_failed"
        assert [bool(one.exc_info) for one in caplog.records if "could not be sent on" in one.getMessage()] == [
            True
        ] * 2
        assert (await running.chat()).status_code == 200
        assert running.gateway.relay.exchanges == set()
        assert running.gateway.models[MODEL].traffic.in_flight == 0
