"""What an answer is taken for: tokens, steps, time per token and charge, for every kind of client and engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.relay.observers import EndedExchange, Observer
from gateway.rooms.recorder.document import RequestNotes
from gateway.routing.routed_request import RoutedRequest
from policies.policy import Outcome
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.stepping_engine import PROMPT_TOKENS, SteppingEngine
from tests.support.upstream import answering

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOKENS, PER_STEP = 60, 3
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [TOOL]},
    "reasoning": {"chat_template_kwargs": {"enable_thinking": True}},
    "structured": {"response_format": {"type": "json_object"}},
    "choices": {"n": 2},
}


class Ends:
    """Keeps the outcomes of all requests; the follower of each."""

    def __init__(self) -> None:
        self.ended: list[EndedExchange] = []

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer:
        return RequestNotes(lambda _, ended: self.ended.append(ended), keeps_answer=False)

    @property
    def last(self) -> Outcome:
        outcome = self.ended[-1].outcome
        assert outcome is not None
        return outcome


def followed(running: Running) -> Ends:
    ends = Ends()
    running.gateway.relay.followers.setdefault(MODEL, []).append(ends)
    return ends


def body_of(api: str, kind: str, *, stream: bool, asks: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages},
        COMPLETIONS: {"prompt": "hi"},
        RESPONSES: {"input": "hi"},
        MESSAGES: {"messages": messages, "max_tokens": 99},
    }
    options = {"stream_options": {"include_usage": True}} if asks else {}
    return {"model": MODEL, "stream": stream, **bodies[api], **KINDS[kind], **options}


APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


def cells(api: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield the kinds of requests that an API has, whether they stream, and whether they ask for the usage."""
    for kind in (
        KINDS if api == CHAT else ("plain", "structured", "choices") if api == COMPLETIONS else list(KINDS)[:-1]
    ):
        for stream in (True, False):
            yield kind, stream, False
            if stream and api in {CHAT, COMPLETIONS}:  # refused elsewhere
                yield kind, stream, True


@pytest.mark.parametrize("reports", [True, False], ids=["reports", "default"])
@pytest.mark.parametrize("api", APIS)
async def test_every_kind_of_answer_is_taken_for_what_it_is(api: str, reports: bool) -> None:
    engine = SteppingEngine(PER_STEP, tokens=TOKENS, reports=reports)
    keys, headers = [{"name": "team", "key": "sk-team"}], {"authorization": "Bearer sk-team"}
    async with start_gateway({"a": "ngram"}, behaviour=engine, keys=keys) as running:
        ends = followed(running)
        await running.chat(stream=True, headers=headers)  # shows what the engine tells unasked
        for kind, stream, asks in cells(api):
            cell, seen = f"{kind}, stream {stream}, asks {asks}", len(ends.ended)
            body = body_of(api, kind, stream=stream, asks=asks)
            response = await running.client.post(api, json=body, headers=headers)
            await running.until(lambda seen=seen: len(ends.ended) > seen)
            choices, outcome, ended = body.get("n", 1), ends.last, ends.ended[-1]
            assert response.status_code == 200, cell
            assert (b'"usage"' in response.content) == (not stream or asks or api in {RESPONSES, MESSAGES}), cell
            assert (outcome.output_tokens, outcome.is_estimated) == (choices * TOKENS, False), cell
            assert (outcome.prompt_tokens, ended.tokens) == (PROMPT_TOKENS, PROMPT_TOKENS + choices * TOKENS), cell
            has_metrics = reports and api in {CHAT, COMPLETIONS} and choices == 1
            has_chunks = stream and choices == 1 and kind != "tools"  # whose parser may hold chunks back
            expected = pytest.approx(PER_STEP) if has_metrics or has_chunks else None
            assert outcome.tokens_per_step == expected, cell
            is_timed = stream and choices == 1
            measured = pytest.approx((ended.last_s - ended.first_s) / (TOKENS - 1)) if is_timed else None
            assert outcome.tpot_s == measured, cell
        assert await running.counted("gateway_key_tokens_total") == sum(ended.tokens for ended in ends.ended)


@pytest.mark.parametrize("tells", ["event", "finish", "every"])
async def test_a_client_gets_the_same_bytes_whether_the_engine_is_asked_or_not(tells: Any) -> None:
    engine = SteppingEngine(PER_STEP, tells=tells)
    async with start_gateway({"a": "ngram"}, behaviour=engine) as running:
        for api, kind in ((CHAT, "plain"), (CHAT, "choices"), (COMPLETIONS, "plain")):
            body = body_of(api, kind, stream=True, asks=False)
            answers = [(await running.client.post(api, json=body)).content for _ in range(3)]
            assert b"system_fingerprint" in answers[0]
            assert len(set(answers)) == 1
            assert b'"usage"' in engine.streamed
            assert all(b'"usage"' not in each and b'"choices":[]' not in each for each in answers)
        assert engine.asked == 8  # all but the first


async def test_an_engine_that_has_been_started_anew_is_looked_at_anew() -> None:
    async with start_gateway({"a": "ngram"}, behaviour=SteppingEngine(PER_STEP)) as running:
        model, other = running.gateway.models[MODEL], SteppingEngine(PER_STEP, forces=True)
        for _ in range(2):
            await running.chat(stream=True)
        running.upstreams["a"].behaviour = other
        backend = model.upstreams["a"].backend
        backend.set_engine(backend.engine.said, is_new=True)
        for _ in range(2):
            assert (await running.chat(stream=True)).content == other.streamed
        assert other.asked == 0


@pytest.mark.slow
async def test_what_is_left_alone_if_engines_are_not_to_be_asked() -> None:
    engine = SteppingEngine(PER_STEP)
    async with start_gateway({"a": "ngram"}, behaviour=engine, ask_usage=False) as running:
        ends = followed(running)
        body = body_of(CHAT, "plain", stream=True, asks=False)
        await running.client.post(CHAT, json=body | {"stream_options": {"include_usage": True}})
        for _ in range(2):
            answer = await running.client.post(CHAT, json=body)
        await running.until(lambda: len(ends.ended) == 3)
        assert answer.content == engine.streamed
        assert engine.asked == 1
        assert (ends.last.output_tokens, ends.last.is_estimated) == (TOKENS, True)  # by what the first one showed
        assert ends.last.tokens_per_step is None
        assert ends.last.steps == TOKENS / PER_STEP
        assert await running.counted("gateway_output_tokens_total") == 3 * TOKENS


async def test_chunks_of_tool_calls_say_nothing_of_text() -> None:
    """The parser of tool calls holds chunks back, so that each has more tokens; a request may bound its own."""
    async with start_gateway({"a": "baseline"}, behaviour=SteppingEngine(joined=10), ask_usage=False) as running:
        ends = followed(running)
        await running.client.post(CHAT, json=body_of(CHAT, "tools", stream=True, asks=True))
        running.upstreams["a"].behaviour = SteppingEngine()
        for kind, bound, tokens in (("plain", None, TOKENS), ("tools", None, 10 * TOKENS), ("tools", 99, 99)):
            body = body_of(CHAT, kind, stream=True, asks=False) | {"max_tokens": bound}
            await running.client.post(CHAT, json=body)
            await running.until(lambda: not running.gateway.relay.exchanges)
            assert (ends.last.output_tokens, ends.last.is_estimated) == (tokens, True), (kind, bound)


async def test_an_engine_that_refuses_to_be_asked_is_asked_once() -> None:
    engine = SteppingEngine(PER_STEP)
    async with start_gateway({"a": "ngram"}, behaviour=engine) as running:
        ends = followed(running)
        await running.chat(stream=True)
        engine.refuses = True  # another one behind the same address
        answers = [await running.chat(stream=True) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert [b"stream_options" in seen.body for seen in running.upstreams["a"].seen] == [0, 1, 0, 0, 0]
        await running.until(lambda: len(ends.ended) == 4)
        assert ends.last.is_estimated
        assert running.backend("a").in_flight == 0
        own = await running.chat(stream=True, stream_options={"include_usage": True})
        assert own.status_code == 400, "what a client asks for is refused as before"


async def test_an_error_that_is_the_clients_fault_is_passed_on() -> None:
    engine = SteppingEngine(PER_STEP)

    async with start_gateway({"a": "ngram"}, behaviour=engine) as running:
        await running.chat(stream=True)
        for text, sent in (("`stream_options` is fine, but you are not", 2), ("you are not fine", 1)):
            seen = len(running.upstreams["a"].seen)
            running.upstreams["a"].behaviour = answering({"error": {"message": text, "code": 400}}, 400)
            assert (await running.chat(stream=True)).status_code == 400
            assert len(running.upstreams["a"].seen) - seen == sent
        running.upstreams["a"].behaviour = engine
        await running.chat(stream=True)
        assert engine.asked == 1, "it is asked all the same"
