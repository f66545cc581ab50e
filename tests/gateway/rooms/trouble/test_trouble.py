"""Requests that go wrong on one way of speculating: found, said, avoided, moved and forgotten."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from backends.backend import EngineChange
from gateway.rooms.trouble import room as room_module
from gateway.rooms.trouble.answer import is_engines_own
from gateway.rooms.trouble.room import TroubleRoom
from policies.features.request import Endpoint, RequestFeatures
from policies.trouble.troubles import TROUBLE, TroubleFinding
from tests.gateway.conftest import MODEL, Running, bearer, start_gateway
from tests.gateway.rooms.rescue.test_streams import check_is_whole, engine, rescues, stream
from tests.support.upstream import Behaviour, Wire, answer, hang

POOL = {"a": "baseline", "b": "eagle3"}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
JSON = {"response_format": {"type": "json_object"}}
THINK = {"enable_thinking": True}
PATIENT = {"connect_s": 5.0, "first_byte_s": 60.0, "idle_s": 60.0}


def document(name: str, content: str | None, arguments: str | None = None) -> dict[str, Any]:
    """Return an answer with a text, or with a call of a tool."""
    made = answer(name)
    message, reason = {"role": "assistant", "content": content}, "stop"
    if arguments is not None:
        message["tool_calls"] = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": arguments}}]  # type: ignore[assignment]
        reason = "tool_calls"
    made["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
    return made


async def broken(wire: Wire, fault: str) -> None:
    """Answer as an engine does whose drafts have confused it: after a while."""
    await asyncio.sleep(0.2)
    if fault == "status":
        await wire.json({"error": {"message": "grammar", "code": 500}}, 500)
    elif fault == "error event":
        await wire.stream(
            b'data: {"choices": [{"index": 0, "delta": {"content": "{"}}]}\n\n',
            b'data: {"error": {"message": "grammar", "code": 500}}\n\ndata: [DONE]\n\n',
        )
    elif fault == "cut arguments":
        await wire.json(document(wire.upstream.name, None, '{"city": "Par'))
    else:
        await wire.json(document(wire.upstream.name, '{"a": 1}}'))


def faulty(fault: str, fields: dict[str, Any], every: int = 3) -> Behaviour:
    """Return the behaviour of an engine that breaks on every third request with some fields, if it is `b`."""
    asked = 0

    async def behave(wire: Wire) -> None:
        nonlocal asked
        body = wire.seen.json
        concerned = wire.upstream.name == "b" and fields.keys() <= body.keys()
        asked += concerned
        if concerned and asked % every == 0:
            await broken(wire, fault)
        elif body.get("stream"):
            await wire.json_event({"choices": [{"index": 0, "delta": {"content": "{}"}, "finish_reason": "stop"}]})
        else:
            await wire.json(document(wire.upstream.name, "{}"))

    return behave


def taken(running: Running, name: str, fields: dict[str, Any]) -> int:
    """Return how many requests with some fields a backend has had."""
    asked = [seen for seen in running.upstreams[name].seen if seen.target.startswith("/v1/chat")]
    return sum(fields.keys() <= seen.json.keys() for seen in asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "fault", "fields"),
    [
        ("least_loaded", "status", TOOLS),
        ("learned", "error event", TOOLS),
        ("least_loaded", "cut arguments", TOOLS),
        ("learned", "not JSON", JSON),
    ],
)
async def test_what_breaks_is_found_said_avoided_and_forgotten(
    caplog: pytest.LogCaptureFixture, policy: str, fault: str, fields: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO)
    said = {"name": policy} | ({"guardrail": {"share": 0}} if policy == "learned" else {})
    asked = fields | ({"stream": True} if fault == "error event" else {})
    async with start_gateway(POOL, said, behaviour=faulty(fault, fields)) as running:
        troubles = running.gateway.models[MODEL].troubles
        for _ in range(200):
            if troubles.found:
                break
            await asyncio.gather(*[running.chat(**asked) for _ in range(4)])
        (found,) = troubles.found
        assert (found.place, found.share) == ("eagle3:3", pytest.approx(1 / 3, abs=0.1))
        shape = "tools" if fields is TOOLS else "json_object"
        problem = "failed" if fault in {"status", "error event"} else "unusable"
        assert (found.shape, found.problem) == ((shape,), problem)
        await running.until(lambda: any("such requests go elsewhere" in each for each in caplog.messages))
        labels = {"model": MODEL, "place": "eagle3:3", "problem": problem, "shape": shape}
        assert 0.0 < await running.counted("gateway_trouble_share", **labels) < 1.0
        before = taken(running, "b", fields)
        for _ in range(30):
            response = await running.chat(**asked)
            assert response.status_code == 200
        assert taken(running, "b", fields) <= before + 3, "there is a safe one, as good"
        plain = [await running.chat() for _ in range(4)]
        assert {each.status_code for each in plain} == {200}
        assert f"requests with {shape} {problem}" in json.dumps(await running.explain(**fields))
        running.gateway.models[MODEL].engine_changed("b", EngineChange.RESTART)
        await running.until(lambda: any("no longer: eagle3:3" in each for each in caplog.messages))
        assert troubles.found == ()
        assert await running.counted("gateway_trouble_share", **labels) == 0.0


async def test_a_model_that_cannot_be_searched_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_gateway(POOL) as running:
        (found,) = [each for each in running.gateway.rooms if isinstance(each, TroubleRoom)]
        model, searched = running.gateway.models[MODEL], Counter[str]()
        broken = SimpleNamespace(troubles=SimpleNamespace(found=(), refresh=lambda: 1 / 0))
        monkeypatch.setattr(model.troubles, "refresh", lambda: searched.update([MODEL]))
        monkeypatch.setattr(found, "gateway", SimpleNamespace(models={"broken": broken, MODEL: model}))
        await running.until(lambda: searched[MODEL] > 1)


async def test_findings_that_come_and_go_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with start_gateway(POOL, {"name": "least_loaded"}) as running:
        (room,) = [each for each in running.gateway.rooms if isinstance(each, TroubleRoom)]
        troubles = running.gateway.models[MODEL].troubles
        finding = TroubleFinding("eagle3:3", "", ("tools",), "failed", 5.0, 10.0, 1.0)
        for number in range(20):
            troubles.found = replace(finding, client=f"key-{number}"), replace(finding, client=f"key-{number + 1}")
            room.tick()
    lines = [record.message for record in caplog.records if record.name == room_module.__name__]
    assert len(lines) == 8
    assert ["further ones" in line for line in lines] == [False] * 7 + [True]


KEYS = [{"name": name, "key": f"sk-{name}", "may_override": True} for name in ("hostile", "other")]


def test_what_may_bend_or_cut_an_answer_is_no_evidence() -> None:
    request = RequestFeatures("m", Endpoint.CHAT, temperature=1.0)
    assert is_engines_own(request, {"messages": [], "stop": None})
    for field in ("stop", "stop_token_ids", "bad_words", "echo", "continue_final_message", "an_option_of_tomorrow"):
        assert not is_engines_own(request, {"messages": [], field: True})
    for changed in (replace(request, n=2), replace(request, temperature=2.0), replace(request, restricted=True)):
        assert not is_engines_own(changed, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", [{"stop": ["}"]}, {"headers": {"x-gateway-method": "eagle3"}}, {}], ids=["stop", "headers", "nothing"]
)
async def test_what_one_key_asks_for_takes_no_replica_from_another(own: dict[str, Any]) -> None:
    async def behave(wire: Wire) -> None:
        is_hostile = "hostile" in json.dumps(wire.seen.json["messages"])
        await wire.json(document(wire.upstream.name, '{"a": ' if is_hostile and wire.upstream.name == "b" else "{}"))

    async with start_gateway(POOL, {"name": "least_loaded"}, behaviour=behave, keys=KEYS) as running:
        troubles = running.gateway.models[MODEL].troubles
        for key, number in (("other", 10), ("hostile", 40)):
            fields = {"headers": {}, **(own if key == "hostile" else {})}
            fields["headers"] = {**bearer(f"sk-{key}"), **fields["headers"]}
            for _ in range(number):
                (await running.chat(key, **JSON, **fields)).raise_for_status()
        if not own:
            await running.until(lambda: bool(troubles.found))
        troubles._is_due, troubles._pause_s = True, 0.0
        troubles.refresh()
        clients = {client.name: client.id for client in running.gateway.relay.access.keyring.clients}
        assert {each.client for each in troubles.found} == ({clients["hostile"]} if not own else set())
        before = taken(running, "b", JSON)
        for _ in range(60):  # of which fewer than 5 go to one of two equals once in 10^12 runs
            await running.chat("other", **JSON, headers=bearer("sk-other"))
        assert taken(running, "b", JSON) - before >= 5


@pytest.mark.slow
async def test_a_failed_request_goes_to_a_replica_that_speculates_otherwise() -> None:
    """Of two with the method that failed and one without, that one gets every retry."""
    methods = {"a": "eagle3", "b": "eagle3", "c": "baseline"}

    async def behave(wire: Wire) -> None:
        await (wire.json(document("c", "{}")) if wire.upstream.name == "c" else broken(wire, "status"))

    async with start_gateway(methods, behaviour=behave) as running:
        answers = [await running.chat() for _ in range(9)]
        assert {each.json()["choices"][0]["message"]["content"] for each in answers} == {"{}"}


@pytest.mark.slow
async def test_a_stream_that_stalls_goes_on_elsewhere_and_is_counted_where_it_was() -> None:
    async with start_gateway(POOL, rescue=True, timeouts=PATIENT) as running:
        running.upstreams["a"].behaviour, running.upstreams["b"].behaviour = engine(), engine(events=6, end=hang)
        answers = await asyncio.gather(*[stream(running, logprobs=False, chat_template_kwargs=THINK) for _ in range(2)])
        for response in answers:
            check_is_whole(response)
        assert await rescues(running) == {"b complete": 1}
        assert running.backend("b").in_flight == 0
        statistics = running.gateway.models[MODEL].troubles.statistics
        sums = {key[:3]: each[:4] for key, each in statistics.buckets(TROUBLE).items()}
        assert sums == {
            ("baseline:0", "a", "thinking"): pytest.approx((2.0, 0.0, 0.0, 0.0), rel=0.01),
            ("eagle3:3", "b", "thinking"): pytest.approx((1.0, 0.0, 1.0, 0.0), rel=0.01),
        }


@pytest.mark.slow
async def test_streams_of_a_replica_that_is_silent_for_all_stay() -> None:
    """It may be computing a long prompt."""
    is_free = asyncio.Event()

    async def wait_and_end(wire: Wire) -> None:
        await is_free.wait()
        wire.reset()

    async with start_gateway(rescue=True, timeouts=PATIENT) as running:
        for name in running.upstreams:
            running.upstreams[name].behaviour = engine(events=6, end=wait_and_end)
        streams = [asyncio.create_task(stream(running)) for _ in range(4)]
        await running.until(lambda: {each.in_flight for each in running.gateway.pool} == {2})
        upstreams = running.gateway.models[MODEL].upstreams.values()
        swept_s = [each.backend.read_s + 4.5 for each in upstreams]
        await running.until(lambda: time.perf_counter() > max(swept_s))
        assert await rescues(running) == {}
        for upstream in running.upstreams.values():
            upstream.behaviour = engine()
        is_free.set()
        for response in await asyncio.gather(*streams):
            check_is_whole(response)
