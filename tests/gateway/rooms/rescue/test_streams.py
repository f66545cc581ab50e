"""Streams whose backend dies, with scripted upstreams on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends import background
from lab.trace.read import read_trace
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.gateway.reload.test_change import backends_of, change
from tests.support.token_engine import TokenEngine, answer_of, decode
from tests.support.upstream import Behaviour, Wire, answering

SCRIPT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100, 101, 14, 12, 0, 1]
TEXT = decode(SCRIPT)
THREE = {"a": "baseline", "b": "baseline", "c": "baseline"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 100},
}


def engine(*, events: int | None = None, end: Callable[[Wire], Any] = Wire.reset, step: int = 1) -> Behaviour:
    """Return a behaviour that answers like vLLM, but ends after some events in another way."""

    async def answer(wire: Wire) -> None:
        if wire.seen.target == "/detokenize":
            await wire.json({"prompt": decode(wire.seen.json["tokens"])})
            return
        tokens = TokenEngine(SCRIPT, step, wire.upstream.name)
        await wire.begin_stream()
        sent = list(tokens.events(wire.seen.json, chat="chat" in wire.seen.target))
        for event in sent[:events]:
            await wire.chunk(event)
        if events is None:
            await wire.end_stream()
        elif (ending := end(wire)) is not None:
            await ending

    return answer


def behave(running: Running, **behaviours: Behaviour) -> None:
    for name, behaviour in behaviours.items():
        running.upstreams[name].behaviour = behaviour


async def stream(running: Running, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **BODIES[path], **fields}
    return await running.client.post(path, json=body)


async def rescues(running: Running) -> dict[str, float]:
    """Return the counts of rescues that are not zero: `backend outcome` -> number."""
    await running.until_read()
    running.gateway.metrics.flush()
    samples = [each for each in running.gateway.metrics.samples() if each.name == "gateway_rescues_total"]
    return {f"{each.labels['backend']} {each.labels['outcome']}": each.value for each in samples if each.value}


def asked(running: Running) -> list[bool]:
    """Return which of the requests to the first backend ask for ids."""
    return ["return_token_ids" in seen.json for seen in running.upstreams["a"].seen]


def check_is_whole(response: httpx.Response, prompt_tokens: int = 3) -> None:
    text, reason, usage = answer_of(response.content)
    assert (text, reason) == (TEXT, "stop")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, len(SCRIPT))
    assert response.content.endswith(b"data: [DONE]\n\n")
    assert response.content.count(b"[DONE]") == 1
    assert response.content.count(b'"role"') <= 1
    assert b'token_ids":[' not in response.content
    ids = {json.loads(line[6:])["id"] for line in response.content.split(b"\n") if line.startswith(b"data: {")}
    assert len(ids) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("events", [1, 12, 18])  # up to within a character, and to the end of the text
async def test_a_stream_outlives_its_backend(running: Running, path: str, events: int) -> None:
    behave(running, a=engine(events=events), b=engine(step=2))
    check_is_whole(await stream(running, path))
    assert running.backend("a").in_flight == running.backend("b").in_flight == 0
    check_is_whole(await stream(running, path))  # on the connection that is left
    counts = await rescues(running)
    assert counts.get("a failed", 0) == counts.get("a impossible", 0) == 0


def reasoning_engine(*, events: int | None = None) -> Behaviour:
    """Return a behaviour that answers like vLLM with a parser of reasoning, or ends after some events."""
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas = ({"role": "assistant", "content": ""}, {}, {"reasoning": "so"}, {"reasoning": "!"}, {"content": "42"})

    async def answer(wire: Wire) -> None:
        if wire.seen.target != "/v1/chat/completions":
            await wire.json({"prompt": "<think>"})  # what the tokens so far are
            return
        await wire.begin_stream()
        for number, delta in list(enumerate(deltas))[:events]:
            choice = {"index": 0, "delta": delta, "finish_reason": "stop" if number == 4 else None}
            begin = {"prompt_token_ids": [1]} if number == 0 else {}
            document = {**head, **begin, "choices": [choice | ({"token_ids": [number]} if number else {})]}
            await wire.chunk(b"data: %b\n\n" % json.dumps(document).encode())
        if events is None:
            await wire.chunk(b"data: [DONE]\n\n")
            await wire.end_stream()
        else:
            wire.reset()

    return answer


@pytest.mark.parametrize("events", [1, 2])  # up to the role, and up to the token that begins the reasoning
async def test_a_stream_without_text_begins_again_with_its_reasoning(running: Running, events: int) -> None:
    behave(running, a=reasoning_engine(events=events), b=reasoning_engine())
    response = await stream(running, stream_options=None)
    lines = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    deltas = [line["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "so!"
    assert "".join(delta.get("content") or "" for delta in deltas) == "42"
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("events", [2, 18])
async def test_a_client_that_asked_for_no_usage_gets_none_from_a_rescued_stream(running: Running, events: int) -> None:
    for name, behaviour in (("a", engine(events=events)), ("b", engine(step=2))):
        running.upstreams[name].behaviour = engine()
        await stream(running, stream_options=None)  # shows what the engine tells unasked
        running.upstreams[name].behaviour = behaviour
    answers = [await stream(running, stream_options=None) for _ in range(2)]
    for response in answers:
        text, reason, usage = answer_of(response.content)
        assert (text, reason, usage) == (TEXT, "stop", None)
    assert b'"system_fingerprint":"v1"' in answers[1].content, "the rest of the first is not what its engine shows"
    assert any("stream_options" in seen.body.decode() for seen in running.upstreams["a"].seen)
    assert (await rescues(running)).get("a complete") == (1 if events < 17 else None), "only the end was missing"


@pytest.mark.slow
async def test_a_stream_outlives_two_backends_but_not_three() -> None:
    methods = {**THREE, "d": "baseline"}
    async with start_gateway(methods) as running:
        for name in methods:
            running.upstreams[name].behaviour = engine(events=5)
        running.upstreams["c"].behaviour = engine()
        check_is_whole(await stream(running))
        running.upstreams["c"].behaviour = engine(events=5)
        for _ in range(3):  # wherever it begins
            response = await stream(running)
            assert b"backend_broken" in response.content
        served = [seen.target for upstream in running.upstreams.values() for seen in upstream.seen]
        assert len([target for target in served if "completions" in target]) == 12


async def test_a_backend_that_refuses_to_go_on_is_not_the_last_to_try(three: Running) -> None:
    async def refuse(wire: Wire) -> None:
        await (engine() if wire.seen.target == "/detokenize" else answering({"error": {"code": 400}}, 400))(wire)

    behave(three, a=engine(events=5), b=refuse, c=engine())
    check_is_whole(await stream(three))


@pytest.mark.parametrize(
    "behaviour", [answering({"prompt": "something else"}), answering({"detail": "Not Found"}, 404)]
)
async def test_without_the_text_of_the_tokens_the_stream_ends_with_an_error(
    three: Running, behaviour: Behaviour
) -> None:
    behave(three, a=engine(events=5), b=behaviour)
    response = await stream(three)
    assert b"Backend a closed the connection" in response.content
    assert await rescues(three) == {"a failed": 1}
    assert three.backend("a").in_flight == three.backend("b").in_flight == 0


@pytest.mark.parametrize(
    ("rescue", "fields", "counts"), [(None, {"seed": 1}, {"a impossible": 1}), (False, {}, {})], ids=["seed", "off"]
)
async def test_what_cannot_be_continued_ends_with_an_error(
    rescue: bool | None, fields: dict[str, Any], counts: dict[str, int]
) -> None:
    async with start_gateway(rescue=rescue) as running:
        behave(running, a=engine(events=5), b=engine())
        assert b"backend_broken" in (await stream(running, **fields)).content
        assert await rescues(running) == counts
        assert asked(running) == [False]


async def test_an_engine_that_takes_no_notice_is_asked_once_in_its_life() -> None:
    async def old(wire: Wire) -> None:
        tokens = TokenEngine(SCRIPT, 1, wire.upstream.name)
        body = {"stream_options": {"include_usage": True}, "max_tokens": None}
        await wire.stream(*tokens.events(body, chat=True))

    async with start_gateway(policy={"name": "static", "backend": "a"}) as running:
        running.upstreams["a"].behaviour = old
        for _ in range(3):
            check_is_whole(await stream(running))
        assert asked(running) == [True, False, False]
        backend = running.gateway.models[MODEL].upstreams["a"].backend
        backend.set_engine(backend.engine.said, is_new=True)
        check_is_whole(await stream(running))
        assert asked(running)[3:] == [True]


async def test_an_engine_that_refuses_what_it_does_not_know_serves_all_the_same() -> None:
    async def strict(wire: Wire) -> None:
        if "return_token_ids" in wire.seen.json:
            await wire.json({"object": "error", "message": "body.return_token_ids: not permitted", "code": 400}, 400)
        else:
            await engine()(wire)

    async with start_gateway(policy={"name": "static", "backend": "a"}) as running:
        running.upstreams["a"].behaviour = strict
        for _ in range(3):
            assert answer_of((await running.chat(stream=True)).content) == (TEXT, "stop", None)
        assert asked(running) == [True, False, False, False]


async def test_a_client_that_leaves_during_a_rescue_ends_it(running: Running) -> None:
    waiting = asyncio.Event()

    async def wait(wire: Wire) -> None:
        waiting.set()
        await wire.until_closed()

    behave(running, a=engine(events=5), b=wait)
    request = asyncio.create_task(stream(running))
    await waiting.wait()
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    await running.until(lambda: running.upstreams["b"].aborted == 1)
    await running.until(lambda: running.backend("b").in_flight == 0)
    assert await rescues(running) == {"a cancelled": 1}


async def test_a_rescue_is_in_the_record(tmp_path: Path) -> None:
    recorder = {"path": str(tmp_path / "trace"), "text": "full", "flush_s": 0.1}
    async with start_gateway(recorder=recorder) as running:
        behave(running, a=engine(events=5), b=engine())
        check_is_whole(await stream(running))
    (record,) = read_trace(tmp_path / "trace", strict=True)
    assert (record.backend, record.rescued_from, record.rescued_at) == ("b", "a", 4)
    assert (record.reason, record.output, record.output_tokens) == ("rescue", TEXT, len(SCRIPT))


async def test_a_stream_outlives_a_backend_that_leaves_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a pod dies, and discovery finds it no more."""
    failures: list[str] = []
    monkeypatch.setattr(background, "on_failure", [failures.append])
    goes_on, may_end = asyncio.Event(), asyncio.Event()

    async def held(wire: Wire) -> None:
        if wire.seen.target != "/detokenize":
            goes_on.set()
            await may_end.wait()
        await engine()(wire)

    async with start_gateway({"a": "baseline", "b": "baseline"}) as running:
        behave(running, a=engine(events=5), b=held)
        request = asyncio.create_task(stream(running))
        await goes_on.wait()
        await change(running, backends=backends_of(running.upstreams["b"]))
        may_end.set()
        check_is_whole(await request)
        served = f'gateway_requests_total{{backend="b",method="baseline",model="{MODEL}",outcome="ok"}} 1.0'
        assert served in (await running.client.get("/metrics")).text
    assert not failures
