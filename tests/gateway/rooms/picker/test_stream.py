"""A request on its way through a proxy: where it is sent, what it carries, and how its answer is accounted for."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from gateway.dialects.errors import GatewayError
from gateway.relay.context import STOPPING
from gateway.rooms.picker.ext_proc_pb2 import ProcessingRequest
from gateway.rooms.picker.server import bounded
from tests.gateway.rooms.picker.played_proxy import (
    ANSWER,
    BODY,
    EVENTS,
    FULL_DUPLEX,
    IDLE,
    NONE,
    STREAMED,
    PlayedProxy,
)
from tests.support.waiting import eventually

EVENT = b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
LEARNED = {"policy": {"name": "learned"}}

# The request


@pytest.mark.parametrize(("fallbacks", "others"), [(2, ",10.0.0.3:8000,10.0.0.2:8000"), (0, "")])
async def test_the_chosen_replica_comes_first_and_then_the_least_loaded(fallbacks: int, others: str) -> None:
    proxy = PlayedProxy({"picker": {"fallbacks": fallbacks}})
    proxy.backends["b"].in_flight = 5
    stream = proxy.picked()
    assert stream.destinations == f"10.0.0.1:8000{others}"
    assert proxy.backends["a"].in_flight == 1
    assert proxy.count("gateway_decisions_total", policy="static") == 1


async def test_a_large_body_waits_for_its_turn_and_is_bounded_in_values() -> None:
    proxy = PlayedProxy({"server": {"max_body_values": 50_000}})
    refused = proxy.picked(body=b'{"model": "m", "prompt": [%b1]}' % (b"1," * 60_000), path="/v1/completions")
    await eventually(lambda: refused.wire.has_ended)
    assert refused.error == (413, "too_many_values")
    left = proxy.picked(body=json.dumps({"model": "m", "prompt": "x" * 10**6}).encode(), path="/v1/completions")
    limits = left.handler._relay.limits
    assert limits.in_flight == 1
    left.handler.close()
    assert limits.in_flight == 0
    sent = proxy.picked(body=json.dumps({"model": "m", "prompt": "x" * 10**6}).encode(), path="/v1/completions")
    await eventually(lambda: sent.bodies)
    assert left.bodies == []


async def test_keys_and_their_limits_hold_and_the_key_is_not_for_the_engine() -> None:
    proxy = PlayedProxy({"keys": [{"name": "team", "key": "sk", "requests_per_minute": 1}]})
    denied = proxy.stream()
    denied.request()
    assert denied.error[0] == 401
    key = ("authorization", "Bearer sk")
    assert proxy.picked(headers=[key]).removed_headers == ["authorization"]
    assert proxy.picked(headers=[key]).error == (429, "rate_limit_exceeded")
    backends = {"a": {"method": "baseline", "url": "http://10.0.0.1:8000", "api_key": "engine"}}
    own = PlayedProxy(model={"backends": backends}).picked(headers=[("x-api-key", "sk")])
    assert (own.set_headers["authorization"], own.removed_headers) == ("Bearer engine", ["x-api-key"])


async def test_headers_that_are_for_the_gateway_do_not_reach_the_engine() -> None:
    headers = [("x-gateway-workload", "code"), ("x-gateway-destination-endpoint", "10.9.9.9:1"), ("x-request-id", "r")]
    headers += [("x-vllm-priority", "-99"), ("x-session-id", "7")]
    stream = PlayedProxy().picked(headers=headers)
    assert stream.removed_headers == ["x-gateway-workload", "x-vllm-priority"], "the bounds of the key would not hold"
    assert stream.destinations.startswith("10.0.0.1:8000"), "what the client named is overwritten"
    assert stream.set_headers["x-request-id"].endswith("-r"), "so that nobody takes the id of another's request"


async def test_what_was_judged_is_what_the_engine_gets() -> None:
    stream = PlayedProxy().picked(path="/v1/chat/%63ompletions/?x=1")
    assert stream.set_headers[":path"] == "/v1/chat/completions?x=1"


@pytest.mark.parametrize("path", ["/admin/pool", "/metrics", "/dashboard", "/dashboard/main.js"])
async def test_the_gateways_own_paths_are_not_served_through_the_proxy(path: str) -> None:
    stream = PlayedProxy().stream()
    stream.request(path=path, method="GET", is_last=True)
    assert stream.error == (404, "not_found")


async def test_a_path_of_the_gateway_that_cannot_be_answered_leaves_no_proxy_waiting() -> None:
    stream = PlayedProxy().stream()  # whose client for the gateway's own paths has nobody to ask
    stream.request(path="/v1/models", method="GET", is_last=True)
    await eventually(lambda: stream.wire.has_ended)
    (answer,) = stream.wire.sent
    assert answer.immediate_response.status.code == 500
    assert json.loads(answer.immediate_response.body)["error"]["code"] == "gateway_failed"


async def test_an_answer_of_the_gateway_that_is_too_large_is_not_held(tmp_path: Path) -> None:
    parts, chunk = Counter[str](), b"x" * (1 << 20)

    async def read() -> AsyncIterator[bytes]:
        for _ in range(200):
            parts["read"] += 1
            yield chunk

    app = FastAPI()
    app.add_route("/v1/files/a/content", lambda _: StreamingResponse(read()))
    proxy = PlayedProxy({"batches": {"folder": str(tmp_path)}})
    proxy.picking.own = httpx.AsyncClient(transport=httpx.ASGITransport(bounded(app)), base_url="http://gateway")
    stream = proxy.stream()
    stream.request(path="/v1/files/a/content", method="GET", is_last=True)
    await eventually(lambda: stream.wire.has_ended)
    assert stream.error == (413, "answer_too_large")
    assert parts["read"] == 65


async def test_a_path_of_the_gateway_gets_the_body_of_its_request(tmp_path: Path) -> None:
    seen: list[tuple[str, str, bytes]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.path, request.content))
        return httpx.Response(200, json={})

    proxy = PlayedProxy({"batches": {"folder": str(tmp_path)}})
    proxy.picking.own = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway")
    stream = proxy.stream()
    stream.request([("content-length", "10")], path="/v1/batches")
    stream.body(b"01234", b"56789")
    await eventually(lambda: stream.wire.has_ended)
    assert seen == [("POST", "/v1/batches", b"0123456789")]
    assert proxy.in_flight() == IDLE
    leaving = proxy.stream()
    leaving.request(path="/v1/batches")
    leaving.piece(b"01234")
    leaving.handler.close()
    assert proxy.in_flight() == IDLE
    assert len(seen) == 1


async def test_a_body_above_the_bound_is_refused_before_and_while_it_comes() -> None:
    proxy = PlayedProxy({"server": {"max_body_mib": 0.001}})
    announced = proxy.stream()
    announced.request([("content-length", "2000")])
    assert announced.error == (413, "body_too_large")
    sent = proxy.stream()
    sent.request()
    sent.piece(b"x" * 2000)
    assert sent.error == (413, "body_too_large")
    sent.handler.close()
    assert proxy.in_flight() == IDLE


async def test_of_unfinished_requests_above_the_bound_the_largest_pay() -> None:
    proxy = PlayedProxy({"server": {"max_body_mib": 0.001, "max_unfinished_mib": 0.004}})
    stalled = [proxy.stream() for _ in range(5)]
    for number, stream in enumerate(stalled):
        stream.request()
        stream.piece(b"x" * (800 + number))
    assert proxy.in_flight()["unfinished"] == 5 * 800 + 10
    sent = proxy.picked(body=BODY + b" " * 200)
    assert sent.destinations, "whoever comes next is served"
    assert [stream.wire.has_ended for stream in stalled] == [False, False, False, False, True]
    assert stalled[4].error == (429, "overloaded")
    stalled[4].handler.handle(ProcessingRequest(request_body={"body": b"x" * 800}))
    assert proxy.in_flight()["unfinished"] == 4 * 800 + 6
    for stream in (*stalled, sent):
        stream.handler.close()
    assert proxy.in_flight() == IDLE


@pytest.mark.parametrize("drips", [False, True])
async def test_a_body_that_stalls_or_takes_too_long_is_refused(drips: bool) -> None:
    proxy = PlayedProxy({"server": {"body_s": 300}})
    stream, now_s = proxy.stream(), time.monotonic()
    stream.request()
    stream.piece(b"{")
    proxy.picking.unfinished.check(now_s + 59.0)
    assert not stream.wire.has_ended
    if drips:
        stream.handler.read_s = now_s + 290.0
        proxy.picking.unfinished.check(now_s + 299.0)
        assert not stream.wire.has_ended
    proxy.picking.unfinished.check(now_s + (302.0 if drips else 62.0))
    assert stream.error == (408, "request_timeout")
    stream.handler.close()
    assert proxy.in_flight() == IDLE
    answered = proxy.picked()
    proxy.picking.unfinished.check(now_s + 1000.0)
    assert answered.destinations
    assert not answered.wire.has_ended


@pytest.mark.parametrize("modes", [(STREAMED, NONE), (FULL_DUPLEX, STREAMED)])
async def test_bodies_that_come_in_another_way_get_an_error_that_names_the_setting(modes: tuple[int, int]) -> None:
    stream = PlayedProxy().stream(modes[1])
    stream.request(request_mode=modes[0])
    assert stream.error == (500, "proxy_misconfigured")
    assert b"FULL_DUPLEX_STREAMED" in stream.wire.sent[-1].immediate_response.body


async def test_a_request_waits_in_the_queue_and_leaves_it_with_its_stream() -> None:
    proxy = PlayedProxy(model={"queue": {"max_in_flight_per_backend": 1, "max_waiting": 2}})
    running = [proxy.picked(NONE, headers=[("x-gateway-backend", "a")]) for _ in range(3)]
    assert [bool(stream.wire.sent) for stream in running] == [True, False, False]
    dropped = proxy.picked(headers=[("x-gateway-backend", "a")])
    assert dropped.error == (429, "queue_full")
    assert "retry-after" in {each.header.key for each in dropped.wire.sent[-1].immediate_response.headers.set_headers}
    running[1].handler.close()
    running[0].head()
    running[0].handler.close()
    assert running[2].destinations == "10.0.0.1:8000"


async def test_a_stream_is_not_asked_for_its_usage_which_the_proxy_would_pass_on() -> None:
    proxy, body = PlayedProxy(model=LEARNED), BODY.replace(b"{", b'{"stream": true, ', 1)
    for _ in range(6):  # an engine is asked from its second stream on
        stream = proxy.picked(body=body)
        assert stream.bodies == [(body, True)]
        stream.head(headers=EVENTS)
        stream.answer(EVENT, DONE)
    assert proxy.count("gateway_requests_total", outcome="ok") == 6


# The answer


@pytest.mark.parametrize(("model", "tokens"), [(LEARNED, 3), ({}, 0)])
async def test_a_complete_answer_is_passed_on_and_read_where_something_needs_it(
    model: dict[str, Any], tokens: int
) -> None:
    proxy = PlayedProxy(model=model)
    stream = proxy.picked()
    stream.head()
    told = {"x-gateway-backend", "x-gateway-method", "x-gateway-policy", "x-gateway-reason", "x-request-id"}
    assert told <= stream.told.keys()
    stream.answer(ANSWER[:5], ANSWER[5:])
    assert stream.answers == [(ANSWER[:5], False), (ANSWER[5:], False), (b"", True)]
    assert proxy.in_flight() == IDLE
    assert proxy.count("gateway_output_tokens_total") == tokens
    assert proxy.count("gateway_requests_total", outcome="ok") == 1


@pytest.mark.parametrize(("status", "outcome"), [(200, "ok"), (400, "client_error"), (500, "engine_error")])
async def test_an_answer_that_the_proxy_keeps_ends_with_its_stream(status: int, outcome: str) -> None:
    proxy = PlayedProxy(model=LEARNED)
    stream = proxy.picked(NONE)
    stream.head(status)
    assert sum(backend.in_flight for backend in proxy.backends.values()) == 1
    stream.handler.close()
    assert proxy.count("gateway_requests_total", outcome=outcome) == 1
    assert proxy.in_flight() == IDLE


async def test_a_stream_that_ends_early_was_cancelled_unless_the_last_event_has_passed() -> None:
    proxy = PlayedProxy(model=LEARNED)
    for mode in (NONE, FULL_DUPLEX):
        proxy.picked(mode).handler.close()
    for last in (b"", DONE):
        stream = proxy.picked()
        stream.head(headers=EVENTS)
        stream.answer_piece(EVENT + last)
        stream.handler.close()
    assert proxy.count("gateway_requests_total", outcome="cancelled") == 3
    assert proxy.count("gateway_requests_total", outcome="ok") == 1
    assert proxy.in_flight() == IDLE


async def test_a_fallback_that_answered_gets_the_request_and_the_first_one_the_blame() -> None:
    proxy = PlayedProxy()
    for served in ("10.0.0.1:8000", "10.9.9.9:1", ""):  # the chosen one or an unknown one
        stream = proxy.picked(NONE)
        stream.head(served=served)
        stream.handler.close()
    assert proxy.count("gateway_requests_total", backend="a", outcome="ok") == 3
    stream = proxy.picked(NONE)
    stream.head(served="10.0.0.2:8000")
    assert (proxy.backends["a"].in_flight, proxy.backends["b"].in_flight) == (0, 1)
    assert (stream.told["x-gateway-backend"], stream.told["x-gateway-retried-from"]) == ("b", "a")
    stream.handler.close()
    assert proxy.count("gateway_requests_total", backend="b", outcome="ok") == 1
    assert proxy.in_flight() == IDLE


async def test_an_answer_goes_on_without_a_picker_that_stops_if_the_proxy_keeps_it() -> None:
    proxy = PlayedProxy()
    kept, early = proxy.picked(NONE), proxy.picked(NONE)
    kept.head(headers=EVENTS)
    stopping = GatewayError(503, "The gateway is stopping.", code=STOPPING)
    for exchange in list(proxy.gateway.relay.exchanges):
        exchange.end_with_error(stopping)
    assert kept.wire.has_ended
    assert not kept.wire.sent[-1].HasField("immediate_response")
    assert early.error == (503, STOPPING)
    assert proxy.in_flight() == IDLE
