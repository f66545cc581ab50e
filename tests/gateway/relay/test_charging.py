"""What requests are charged, on every path that makes an engine work, and what is ignored as it cannot be."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.gateway.conftest import MODEL, Running, Start
from tests.support.upstream import END, Wire, answer, answering, delta

KEY = {"authorization": "Bearer sk-team"}
KEYS = [{"name": "team", "key": "sk-team"}]


async def charged(running: Running) -> float:
    """Return the tokens that the key has been charged, once no request is in flight."""
    await running.until(lambda: not running.gateway.relay.exchanges)
    return await running.counted("gateway_key_tokens_total", key="team")


def padded(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document after a field that is longer than what the gateway keeps of an answer."""
    return {"data": ['"usage": {"prompt_tokens": 1}'] * 40_000, **document}


REPORTED = [
    ("/v1/rerank", {"results": [], "usage": {"total_tokens": 56}}, 56),
    ("/v1/score", {"data": [], "usage": {"prompt_tokens": 12, "total_tokens": 12, "completion_tokens": 0}}, 12),
    ("/classify", {"data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5}}, 5),
    ("/pooling", padded({"usage": {"prompt_tokens": 6, "prompt_tokens_details": {"cached_tokens": 1}}}), 6),
    ("/v1/messages/count_tokens", {"input_tokens": 31}, 31),
    ("/v2/embed", {"embeddings": {}, "meta": {"billed_units": {"input_tokens": 8}}}, 8),
    ("/v1/audio/transcriptions", {"text": "hi", "usage": {"type": "duration", "seconds": 3}}, 150),
    ("/v1/audio/transcriptions", {"text": "hi", "duration": "2.5", "segments": []}, 125),
    ("/v1/audio/translations", {"text": "hi", "usage": {"type": "tokens", "input_tokens": 9, "output_tokens": 2}}, 11),
]


@pytest.mark.slow
async def test_what_an_engine_reports_is_charged(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, keys=KEYS) as running:
        for path, document, tokens in REPORTED:
            before = await charged(running)
            running.upstreams["a"].behaviour = answering(document)
            response = await running.client.post(path, json={"model": MODEL, "input": "x" * 99}, headers=KEY)
            assert response.json() == document
            assert await charged(running) - before == tokens, path


async def test_without_a_report_the_size_of_the_request_is_charged(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, keys=KEYS) as running:
        upstream, body = running.upstreams["a"], json.dumps({"model": MODEL, "prompt": "x" * 400}).encode()
        upstream.behaviour = answering({"count": 3, "tokens": [1, 2, 3]})
        await running.client.post("/tokenize", content=body, headers=KEY)
        expected = -(-len(body) // 4)
        assert await charged(running) == expected

        upload = b"x" * 32_000
        await running.client.post("/v1/audio/transcriptions", content=upload, headers=KEY)
        expected += 4 * 50  # 8,000 bytes per second
        assert await charged(running) == expected

        upstream.behaviour = answering({"error": {"message": "no such task"}}, 400)
        await running.client.post("/v1/score", content=body, headers=KEY)
        upstream.behaviour = answering({"status": "completed", "usage": {"input_tokens": 9, "output_tokens": 9}})
        await running.client.get("/v1/responses/resp_1", headers=KEY)
        await running.client.post("/v1/responses/resp_1/cancel", headers=KEY)
        assert await charged(running) == expected, "errors, and asking for a stored response, cost nothing"


async def test_a_stream_of_another_endpoint_is_charged_by_its_usage_or_its_events(gateway_of: Start) -> None:
    body = json.dumps({"model": MODEL, "stream": True}).encode()

    async with gateway_of({"a": "baseline"}, keys=KEYS, paths=["/inference/*"]) as running:
        for usage, tokens in ((b"", -(-len(body) // 4) + 5), (b'data: {"usage": {"prompt_tokens": 70}}\n\n', 70)):
            before = await charged(running)

            async def stream(wire: Wire, usage: bytes = usage) -> None:
                await wire.stream(*[b'data: {"token_ids": [1]}\n\n'] * 3, usage + END)

            running.upstreams["a"].behaviour = stream
            response = await running.client.post("/inference/v1/generate", content=body, headers=KEY)
            assert response.content.endswith(b"[DONE]\n\n")
            assert await charged(running) - before == tokens


@pytest.mark.parametrize("with_usage", [False, True])
async def test_a_stream_whose_client_leaves_is_charged_what_was_generated(gateway_of: Start, with_usage: bool) -> None:
    async def endless(wire: Wire) -> None:
        await wire.begin_stream()
        for number in range(20):
            event = delta("word")
            if with_usage:
                usage = b'"usage": {"prompt_tokens": 7, "completion_tokens": %d}' % (2 * number + 2)
                event = event.replace(b'"object"', usage + b', "object"')
            await wire.chunk(event)
        await wire.until_closed()

    async with gateway_of({"a": "baseline"}, behaviour=endless, keys=KEYS) as running:
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "x" * 40}]}
        received = 0
        async with running.client.stream("POST", "/v1/chat/completions", json=body, headers=KEY) as response:
            async for chunk in response.aiter_raw():
                received += chunk.count(b"\n\n")
                if received == 20:
                    break
        await running.until(lambda: running.upstreams["a"].aborted == 1)
        tokens = await charged(running)
        assert tokens == 47 if with_usage else 18 <= tokens - 15 <= 45  # 15 for the prompt


@pytest.mark.slow
async def test_an_answer_that_is_given_up_is_charged_for_the_time_that_its_engine_had(gateway_of: Start) -> None:
    async def at_work(wire: Wire) -> None:
        if "known" in wire.seen.json["messages"][0]["content"]:
            await asyncio.sleep(0.05)
            await wire.json(answer("a", tokens=50))
        else:
            await wire.until_closed()

    async with gateway_of({"a": "baseline"}, {"name": "learned"}, behaviour=at_work, keys=KEYS) as running:
        for _ in range(8):
            await running.chat("known", headers=KEY)
        before = await charged(running)
        assert before == 8 * 57
        pace_s = running.gateway.models[MODEL].upstreams["a"].pace_s
        assert 0.001 <= pace_s < 0.02

        async def give_up(**fields: Any) -> float:
            """Return the tokens that an answer is charged whose time is over, but for its prompt."""
            nonlocal before
            response = await running.chat("x" * 40, headers={**KEY, "x-request-timeout": "0.4"}, **fields)
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
            now = await charged(running)
            before, tokens = now, now - before - 15
            return tokens

        began_s = time.monotonic()
        assert 0.3 / pace_s < await give_up() <= (time.monotonic() - began_s) / pace_s + 1
        assert await give_up(max_tokens=3, n=2) == 6
        assert await give_up(stream=True) == 0, "of a stream one sees what there was"


# What cannot be

IMPLAUSIBLE = "gateway_implausible_reports_total"


async def test_a_key_is_not_charged_tokens_that_no_answer_can_have(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, keys=KEYS) as running:  # whose context has 2,048 tokens
        for number, tokens in enumerate((2**64 - 1, 2049, -1, "many"), 1):
            usage = {"prompt_tokens": 7, "completion_tokens": tokens}
            running.upstreams["a"].behaviour = answering(answer("a") | {"usage": usage})
            assert (await running.chat(headers=KEY)).status_code == 200
            assert await charged(running) < 50 * number
            assert await running.counted(IMPLAUSIBLE) == number


async def test_a_number_of_400_digits_leaves_the_place_of_its_key_free(gateway_of: Start) -> None:
    async def behaviour(wire: Wire) -> None:
        padding = {"data": ["x" * 200_000] * 6}  # so that only its end is read, by a parser that knows no bounds
        body = json.dumps(padding).encode()[:-1] + b', "usage": {"prompt_tokens": %s}}' % (b"9" * 400)
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        await wire.send(b"content-length: %d\r\n\r\n" % len(body) + body)

    keys = [KEYS[0] | {"max_in_flight": 1}]
    async with gateway_of({"a": "baseline"}, keys=keys, behaviour=behaviour) as running:
        for _ in range(3):
            response = await running.client.post("/v1/rerank", json={"model": MODEL}, headers=KEY)
            assert response.status_code == 200, response.text
        assert await running.counted(IMPLAUSIBLE, what="prompt_tokens") == 3


async def test_times_that_cannot_be_are_not_observed(gateway_of: Start) -> None:
    metrics = {"queue_time_ms": 1e300, "generation_time_ms": "soon"}
    async with gateway_of({"a": "baseline"}, behaviour=answering(answer("a") | {"metrics": metrics})) as running:
        assert (await running.chat()).status_code == 200
        for what in metrics:
            assert await running.counted(IMPLAUSIBLE, what=what) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "policy"), [("num_requests_waiting", "least_loaded"), ("kv_cache_usage_perc", "learned")]
)
async def test_a_load_that_cannot_be_fails_no_request(
    gateway_of: Start, caplog: pytest.LogCaptureFixture, field: str, policy: str
) -> None:
    lie = f"vllm:num_requests_running 0.0\nvllm:{field} 1e308\n".encode()
    async with gateway_of({"a": "baseline", "b": "ngram"}, {"name": policy}) as running:
        running.upstreams["a"].metrics = lie
        what = {"num_requests_waiting": "waiting"}.get(field, "kv_usage")
        await running.until(lambda: running.backend("a").engine.metrics is not None)
        while not await running.counted(IMPLAUSIBLE, what=what):
            assert (await running.chat()).status_code == 200
        for _ in range(20):
            assert (await running.chat()).status_code == 200
        assert await running.counted("gateway_policy_errors_total") == 0
        assert caplog.messages.count(f"m/a reports what cannot be, which is ignored: {what}") == 1
