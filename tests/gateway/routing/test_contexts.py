"""Replicas of one model that take contexts of unlike length: whom a request goes to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from backends.backend import Backend
from backends.health import Health, State
from backends.speculation import Method
from gateway.dialects.errors import GatewayError
from gateway.routing import router
from gateway.routing.contexts import nearest, refusal_of
from gateway.routing.routed_request import RoutedRequest
from policies.features.request import TYPICAL_TOKENS, Endpoint, RequestFeatures
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.upstream import Behaviour, answering

SHORT, LONG = 1024, 32_768
LONG_PROMPT = "word " * 3000


def asking(text: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


IMAGE = [{"type": "image_url", "image_url": {"url": "http://x/"}}]
GOES_TO: dict[str, tuple[dict[str, Any], str]] = {
    "short": (asking("Hi"), "ab"),
    "long limit": (asking("Hi", max_tokens=SHORT + 1), "b"),
    "long": (asking(LONG_PROMPT), "b"),
    "just too long": (asking("word " * 4 * (SHORT - TYPICAL_TOKENS), max_tokens=1), "b"),
    "too long for all": (asking("word " * 200_000), "b"),
    "ids near the limit": ({"prompt": [7] * (SHORT - 10)}, "b"),
    "a batch": ({"prompt": [[7] * 400, [7] * 400]}, "ab"),
}


@pytest.mark.slow
async def test_a_request_goes_where_it_is_taken() -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}) as running:
        await until_told(running, a=SHORT, b=LONG)
        answer = await running.client.post("/v1/chat/completions", json={"model": MODEL, **asking(IMAGE)})
        assert answer.headers["x-gateway-backend"] == "b", "an image may have any size"
        for name, (body, goes_to) in GOES_TO.items():
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answers = [await running.client.post(path, json={"model": MODEL, **body}) for _ in range(4)]
            assert "".join(sorted({each.headers["x-gateway-backend"] for each in answers})) == goes_to, name


@pytest.mark.slow
async def test_it_goes_elsewhere_while_none_that_takes_it_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}) as running:
        with caplog.at_level(logging.WARNING):
            await until_told(running, a=SHORT, b=LONG)
            await running.until(lambda: MODEL in running.gateway.pool.unlike.contexts)
        assert caplog.text.count("its engines take contexts of 1,024 to") == 1
        running.backend("b").health = Health(State.EJECTED)
        assert (await running.chat(LONG_PROMPT)).headers["x-gateway-backend"] == "a"
        running.upstreams["a"].max_model_len = LONG
        await running.until(lambda: MODEL not in running.gateway.pool.unlike.contexts)


VLLM = "This model's maximum context length is {} tokens. However, your prompt contains 5000 input tokens. Shorten it."


def refusing(tokens: int, text: str = VLLM) -> Behaviour:
    """Return an engine that refuses each request for its length."""
    return answering({"error": {"message": text.format(tokens), "type": "BadRequestError", "code": 400}}, 400)


async def until_told(running: Running, **tokens: int) -> None:
    for name, each in tokens.items():
        running.upstreams[name].max_model_len = each
    await running.until(lambda: all(running.backend(n).engine.said.context_tokens == t for n, t in tokens.items()))


@pytest.mark.slow
async def test_what_one_refuses_for_its_length_goes_to_one_with_more_room() -> None:
    async with start_gateway({"a": "baseline", "b": "ngram", "c": "ngram"}) as running:
        await until_told(running, a=SHORT, b=SHORT, c=LONG)
        running.upstreams["a"].behaviour = running.upstreams["b"].behaviour = refusing(SHORT)
        answers = [await running.chat("Hi", stream=number < 3) for number in range(6)]
        assert {(answer.status_code, answer.headers["x-gateway-backend"]) for answer in answers} == {(200, "c")}
        sent = [len(running.upstreams[name].seen) for name in "abc"]
        assert (sent[0] + sent[1], sent[2]) == (4, 6), "never from one to the other of the same length"
        assert all(each.health.state is State.UP for each in running.gateway.pool)


async def test_what_all_refuse_is_answered_with_the_numbers_of_all() -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}) as running:
        await until_told(running, a=SHORT, b=LONG)
        running.upstreams["a"].behaviour = refusing(SHORT)
        running.upstreams["b"].behaviour = refusing(LONG)
        answers = [await running.chat("Hi") for _ in range(2)]
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["message"] == f"{VLLM.format(LONG)} Tokens of context by replica: a 1,024, b 32,768."
        listed = (await running.client.get("/v1/models")).json()["data"]
        assert [each["max_model_len"] for each in listed] == [LONG]
        running.backend("b").health = Health(State.EJECTED)
        answer = await running.chat("Hi")
        assert answer.json()["error"]["message"].endswith("a 1,024, b 32,768. Not up: b.")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2"), "it may be taken in a moment"
        assert (await running.chat("Hi", headers={"x-gateway-backend": "a"})).status_code == 400, "it must go to a"
        running.backend("b").health, running.backend("a").health = Health(State.UP), Health(State.EJECTED)
        assert (await running.chat("Hi")).status_code == 400, "the longest has refused it"


@pytest.mark.skipif(not router.__file__.endswith(".py"), reason="compiled, methods cannot be replaced")
async def test_a_refusal_is_answered_although_a_reload_has_removed_what_may_serve_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}) as running:
        await until_told(running, a=SHORT, b=LONG)
        running.backend("b").health = Health(State.EJECTED)
        upstream, members = running.upstreams["a"], running.gateway.relay.router.members
        upstream.behaviour, sent = refusing(SHORT), len(upstream.seen)

        def until_sent(routed: RoutedRequest) -> Sequence[Backend]:
            if len(upstream.seen) > sent:
                raise GatewayError(400, "Nothing may serve it.")
            return members(routed)

        monkeypatch.setattr(running.gateway.relay.router, "members", until_sent)
        assert (await running.chat("Hi")).json()["error"]["code"] == "context_length_exceeded"


async def test_where_all_are_alike_the_engine_itself_is_heard() -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}, behaviour=refusing(2048)) as running:
        answer = await running.chat("Hi")
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, VLLM.format(2048))
        assert sum(len(each.seen) for each in running.upstreams.values()) == 1


@pytest.mark.slow
async def test_a_context_that_is_not_told_is_learned_from_a_refusal_until_the_engine_restarts() -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}) as running:
        await until_told(running, b=LONG)
        backend, upstream = running.backend("a"), running.upstreams["a"]
        upstream.max_model_len = 0
        await upstream.die()
        await running.until(lambda: backend.health.state is State.DOWN)
        await upstream.come_back()
        await running.until(lambda: backend.health.state is State.UP and not backend.engine.said.context_tokens)
        upstream.behaviour = refusing(SHORT)
        answers = [await running.chat(LONG_PROMPT) for _ in range(6)]
        assert {answer.headers["x-gateway-backend"] for answer in answers} == {"b"}
        assert len(upstream.seen) == 1, "refused once"
        assert backend.engine.said.context_tokens == SHORT
        await upstream.die()
        await running.until(lambda: backend.health.state is State.DOWN)
        await upstream.come_back()
        await running.until(lambda: backend.engine.said.context_tokens == 0)


@pytest.mark.parametrize(
    "message",
    [
        VLLM.format(4096),
        "max_tokens=5000 cannot be greater than max_model_len=4096. Please request fewer output tokens.",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure that",
        "The decoder prompt (length 4096) plus the number of requested output tokens (at least 1) is longer than the "
        "maximum model length of 4096. Make sure that",
        "'max_tokens' or 'max_completion_tokens' is too large: 5. This model's maximum context length is 4096 tokens",
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of",
    ],
)
def test_refusals_for_length_are_known_by_their_texts(message: str) -> None:
    assert refusal_of(orjson.dumps({"error": {"message": message}})) == (4096, message)
    assert refusal_of(orjson.dumps({"object": "error", "message": message})) == (4096, message)
    for said in (f"Unknown value: {message}", f"[{{'input': \"{message}\"}}]"):
        assert refusal_of(orjson.dumps({"error": {"message": said}}))[0] == 0, "a client's own words"
    assert refusal_of(orjson.dumps({"detail": [{"input": {"message": message}}]}))[0] == 0
    assert refusal_of(b"no JSON") == refusal_of(b"[]") == (0, "")


@pytest.mark.parametrize(
    ("tokens", "ranges", "kept"),
    [
        (100, {"a": (0, 4096), "b": (4096, 32_768), "c": None}, "ac"),
        (4096, {"a": (0, 4096), "b": (4096, 32_768), "c": None}, "abc"),
        (9000, {"a": (0, 4096), "b": (4096, 32_768)}, "b"),
        (9000, {"a": (0, 2048), "b": (0, 8192)}, "b"),
        (9000, {"a": (0, 2048)}, "a"),
    ],
)
def test_a_range_of_contexts_is_a_wish(tokens: int, ranges: dict[str, tuple[int, int] | None], kept: str) -> None:
    backends = [Backend(name, MODEL, Method.BASELINE, "", context_range=each) for name, each in ranges.items()]
    request = RequestFeatures(MODEL, Endpoint.CHAT, prompt_tokens=tokens)
    assert "".join(each.name for each in nearest(request, backends)) == kept


@pytest.mark.slow
async def test_who_names_a_backend_is_told_what_all_take() -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}) as running:
        await until_told(running, a=SHORT, b=LONG)
        running.upstreams["a"].behaviour = refusing(SHORT)
        answer = await running.chat("Hi", headers={"x-gateway-backend": "a"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].endswith("Tokens of context by replica: a 1,024, b 32,768.")
        assert not running.upstreams["b"].seen
