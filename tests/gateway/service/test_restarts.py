"""A restart is a new engine: what is asked again, what is forgotten, and what its clients see of it."""

from __future__ import annotations

from collections import Counter

import pytest

from backends.backend import Backend, EngineChange
from backends.health import State
from backends.pool import Listener
from tests.gateway.conftest import FAST, MODEL, start_gateway
from tests.support.registered_metrics import value_of
from tests.support.upstream import Upstream, Wire, answer

PAGE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total %d\n"
STARTED = PAGE + b"process_start_time_seconds %d\n"
SELDOM = {**FAST["health"], "interval_s": 60.0}
"""Probes that see no restart, so that requests have to."""


async def long_prompt(wire: Wire) -> None:
    usage = {"prompt_tokens": 20_000, "completion_tokens": 3, "total_tokens": 20_003}
    await wire.json(answer("a") | {"usage": usage})


async def of_another_model(wire: Wire) -> None:
    """Answer as vLLM does to a model that it does not serve."""
    message = f"The model `{wire.seen.json['model']}` does not exist."
    await wire.json({"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}, 404)


async def of_another_key(wire: Wire) -> None:
    await wire.json({"error": "Unauthorized"}, 401)


def become(upstream: Upstream, what: str) -> None:
    """Have another engine answer at the address."""
    if what == "model":
        upstream.model, upstream.behaviour = "other", of_another_model
    else:
        upstream.models = b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n"
        upstream.behaviour = of_another_key


class Changes(Listener):
    """Counts what engines go through."""

    def __init__(self) -> None:
        self.seen = Counter[EngineChange]()

    def engine_changed(self, backend: Backend, change: EngineChange) -> None:
        self.seen[change] += 1


@pytest.mark.slow
@pytest.mark.parametrize("pages", [(STARTED % (9, 7), STARTED % (12, 3)), (PAGE % 9, PAGE % 2), (b"", b"")])
async def test_a_longer_context_after_a_restart_is_known(pages: tuple[bytes, bytes]) -> None:
    async with start_gateway({"a": "baseline"}) as running:
        a, backend = running.upstreams["a"], running.backend("a")
        upstream = running.gateway.models[MODEL].upstreams["a"]
        a.metrics = pages[0]
        await running.until(lambda: (backend.engine.metrics is None) == (not pages[0]))
        changes = Changes()
        running.gateway.pool.listen(changes)
        engine, habits = backend.engine, upstream.habits
        a.metrics, a.max_model_len, a.behaviour = pages[1], 32_768, long_prompt
        await running.until(lambda: backend.engine is not engine)
        await running.chat()
        assert (backend.engine.said.context_tokens, changes.seen) == (32_768, {EngineChange.RESTART: 1})
        assert upstream.habits is not habits
        assert value_of(running.gateway.metrics, "gateway_prompt_tokens_total") == 20_000
        assert value_of(running.gateway.metrics, "gateway_implausible_reports_total") == 0


async def test_a_usage_that_cannot_be_has_the_engine_asked_again() -> None:
    async with start_gateway({"a": "baseline"}, health=SELDOM) as running:
        running.upstreams["a"].max_model_len, running.upstreams["a"].behaviour = 32_768, long_prompt
        await running.chat()
        await running.until(lambda: running.backend("a").engine.said.context_tokens == 32_768)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "reason"),
    [("model", "serves other, not m: start it with"), ("key", "/v1/models answered 401: set the backend's api_key")],
)
async def test_no_client_sees_that_another_engine_is_at_an_address(what: str, reason: str) -> None:
    async with start_gateway(health=SELDOM, keys=[{"name": "team", "key": "sk"}]) as running:
        become(running.upstreams["a"], what)
        own = {"authorization": "Bearer sk"}
        answers = [await running.chat(str(number), stream=number % 2 == 0, headers=own) for number in range(6)]
        assert {each.status_code for each in answers} == {200}
        assert {each.headers["x-gateway-backend"] for each in answers} == {"b"}
        await running.until(lambda: running.backend("a").health.state is State.DOWN)
        assert running.backend("a").health.reason.startswith(reason)
        assert value_of(running.gateway.metrics, "gateway_retries_total", kind=what) > 0
        become(running.upstreams["b"], what)
        last = await running.chat(headers=own)
        assert (last.status_code, last.json()["error"]["code"]) == (503, f"backend_{what}")


async def test_what_a_client_has_asked_for_itself_is_its_own_answer() -> None:
    """The key that it sent on, a stored response, a path that its engines lack, an alias that they do not have."""
    async with start_gateway() as running:
        for upstream in running.upstreams.values():
            upstream.behaviour = of_another_key
        refused = await running.chat(headers={"authorization": "Bearer own"})
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        for upstream in running.upstreams.values():
            upstream.behaviour = lambda wire: wire.json({"detail": "Not Found"}, 404)
        assert (await running.chat()).json() == {"detail": "Not Found"}
        assert {backend.health.state for backend in running.gateway.pool} == {State.UP}
