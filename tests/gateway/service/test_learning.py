"""A gateway with the learned policy, which observes real answers."""

from __future__ import annotations

import asyncio

import pytest

from policies.learned.policy import Learned
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.upstream import END, Wire, delta


async def _steps_of_two_words(wire: Wire) -> None:
    await wire.begin_stream()
    for _ in range(12):
        await wire.chunk(delta("two words "))
        await asyncio.sleep(0.001)
    usage = b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 24, "total_tokens": 31}}'
    await wire.chunk(b"data: " + usage + b"\n\n")
    await wire.chunk(END)
    await wire.end_stream()


def _policy(running: Running) -> Learned:
    policy = running.gateway.relay.router._models[MODEL].policy
    assert isinstance(policy, Learned)
    return policy


@pytest.mark.slow
async def test_a_gateway_learns_while_it_serves() -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}, {"name": "learned", "seed": 1}) as running:
        for upstream in running.upstreams.values():
            upstream.behaviour = _steps_of_two_words
        assert "(220 tokens" in (await running.notes(stream=True))["b"]  # the default before anything was learned
        answers = await asyncio.gather(*[running.chat(stream=True) for _ in range(12)])
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-gateway-policy"] for answer in answers} == {"learned"}
        assert {answer.headers["x-gateway-reason"] for answer in answers} <= {"least_delay", "control"}
        # The policy also learns from requests whose backend it did not choose.
        chosen = [await running.chat(stream=True, headers={"x-gateway-backend": "b"}) for _ in range(6)]
        assert {(answer.headers["x-gateway-backend"], answer.headers["x-gateway-policy"]) for answer in chosen} == {
            ("b", "override")
        }
        known = _policy(running).known
        await running.until(lambda: known.replicas["b"].observed >= 5)  # its step times are fitted in the background
        assert known.lengths.count("", ()) == pytest.approx(18, abs=3), "fewer if an epoch has ended in between"
        assert known.per_step.count("ngram:5", ()) >= 5
        assert "(220 tokens" not in (await running.notes(stream=True))["b"]
        await running.until(lambda: all(one.sent == 0 for one in known.replicas.values()))
