"""Numbers of a replica that cannot be are ignored, counted and said, and harm nobody."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.gateway.conftest import MODEL, Start, start_gateway
from tests.gateway.relay.test_charging import charged
from tests.support.upstream import Behaviour, Wire, answer, answering

KEY = {"authorization": "Bearer sk-team"}
DIGITS = "9" * 400
SERIES = "gateway_implausible_reports_total"


def reporting(**usage: Any) -> Behaviour:
    """Return the behaviour of a replica that answers with a usage; numbers may be given as their digits."""

    async def behaviour(wire: Wire) -> None:
        document = answer(wire.upstream.name) | {"usage": {"prompt_tokens": 7, "completion_tokens": 3} | usage}
        body = json.dumps(document).replace(f'"{DIGITS}"', DIGITS).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        await wire.send(head + body)

    return behaviour


async def test_a_key_is_not_charged_tokens_that_no_answer_can_have(gateway_of: Start) -> None:
    keys = [{"name": "team", "key": "sk-team", "tokens_per_minute": 1000}]
    async with gateway_of({"a": "baseline"}, keys=keys) as running:  # whose context has 2,048 tokens
        for number, tokens in enumerate((2**64 - 1, 2049, -1, "many"), 1):
            running.upstreams["a"].behaviour = reporting(completion_tokens=tokens)
            assert (await running.chat(headers=KEY)).status_code == 200
            assert await charged(running) < 50 * number
            assert await running.counted(SERIES) == number


async def test_a_number_of_400_digits_leaves_the_place_of_its_key_free(gateway_of: Start) -> None:
    keys = [{"name": "team", "key": "sk-team", "max_in_flight": 1}]
    async with gateway_of({"a": "baseline"}, keys=keys) as running:
        padding = {"data": ["x" * 200_000] * 6}  # so that only its end is read, by a parser that knows no bounds

        async def behaviour(wire: Wire) -> None:
            usage = b'"usage": {"prompt_tokens": %s, "total_tokens": %s}}' % ((DIGITS.encode(),) * 2)
            body = json.dumps(padding).encode()[:-1] + b", " + usage
            await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            await wire.send(b"content-length: %d\r\n\r\n" % len(body) + body)

        running.upstreams["a"].behaviour = behaviour
        for _ in range(3):
            response = await running.client.post("/v1/rerank", json={"model": MODEL}, headers=KEY)
            assert response.status_code == 200, response.text
        assert await running.counted(SERIES, what="prompt_tokens") == 3


async def test_times_that_cannot_be_are_not_observed(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        metrics = {"queue_time_ms": 1e300, "generation_time_ms": "soon"}
        running.upstreams["a"].behaviour = answering(answer("a") | {"metrics": metrics})
        assert (await running.chat()).status_code == 200
        for what in ("queue_time_ms", "generation_time_ms"):
            assert await running.counted(SERIES, what=what) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "policy"), [("num_requests_waiting", "least_loaded"), ("kv_cache_usage_perc", "learned")]
)
async def test_a_load_that_cannot_be_fails_no_request(
    caplog: pytest.LogCaptureFixture, field: str, policy: str
) -> None:
    caplog.set_level(logging.WARNING)
    lie = f"vllm:num_requests_running 0.0\nvllm:{field} 1e308\n".encode()
    async with start_gateway({"a": "baseline", "b": "ngram"}, {"name": policy}) as running:
        running.upstreams["a"].metrics = lie
        what = {"num_requests_waiting": "waiting"}.get(field, "kv_usage")
        await running.until(lambda: running.backend("a").engine.metrics is not None)
        while not await running.counted(SERIES, what=what):
            assert (await running.chat()).status_code == 200
        for _ in range(20):
            assert (await running.chat()).status_code == 200
        assert await running.counted("gateway_policy_errors_total") == 0
        assert caplog.messages.count(f"m/a reports what cannot be, which is ignored: {what}") == 1
