"""Gateways with a learning policy: restarts, several gateways on one store, and a Redis that hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.backend import Candidate
from gateway.state import redis_client, sync
from policies import policy
from policies.features.request import RequestFeatures
from policies.policy import Decision, Outcome, Policy, PolicySettings
from policies.statistics import Statistics
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.redis_server import RedisServer
from tests.support.state_member import LENGTH


class Tally(Policy):
    """Counts the answers and their tokens, by backend."""

    name = "tally"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self.statistics: Statistics = Statistics((LENGTH,), time.time)

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        return Decision(min(candidate.name for candidate in candidates), self.name, "first_by_name")

    def observe(self, outcome: Outcome) -> None:
        self.statistics.add(LENGTH, (outcome.decision.backend,), 1.0, float(outcome.output_tokens))


@pytest.fixture(autouse=True)
def tally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policy._REGISTRY, Tally.name, Tally)
    monkeypatch.setattr(sync, "PERIOD_S", 0.05)
    monkeypatch.setattr(sync, "_MAX_BACKOFF_S", 0.1)
    monkeypatch.setattr(redis_client, "_ANSWER_S", 0.3)


@contextlib.asynccontextmanager
async def learning(state: dict[str, Any]) -> AsyncIterator[Running]:
    async with start_gateway({"a": "baseline"}, {"name": Tally.name}, state=state) as running:
        yield running


def answers(running: Running) -> float:
    """Return the number of answers that a gateway has counted, including those of other gateways."""
    learner = running.gateway.models[MODEL].policy
    assert isinstance(learner, Tally)
    return round(sum(sums[0] for sums in learner.statistics.buckets(LENGTH).values()), 6)


async def ask(running: Running, times: int) -> None:
    for _ in range(times):
        assert (await running.chat()).status_code == 200


@pytest.fixture(params=["file", "redis"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The section `state` of the pool file."""
    if request.param == "file":
        return {"file": str(tmp_path / "state.sqlite")}
    server: RedisServer = request.getfixturevalue("redis")
    return {"redis": server.url}


@pytest.mark.slow
async def test_statistics_survive_a_restart(state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "PERIOD_S", 3600.0)  # synchronise only at start and stop
    async with learning(state) as running:
        await ask(running, 3)
    async with learning(state) as running:
        assert answers(running) == 3, "before the first request"
        await ask(running, 2)
    async with learning(state) as running:
        assert answers(running) == 5


async def test_state_none_keeps_nothing() -> None:
    async with start_gateway({"a": "baseline"}, {"name": Tally.name}, state="none") as running:
        await ask(running, 2)
        assert answers(running) == 2
        assert "gateway_state_connected{" not in (await running.client.get("/metrics")).text
