"""Spans of real requests, as an OpenTelemetry receiver gets them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from backends.launch.ports import free_port
from benchmarks.metrics_page import total
from gateway.config.settings.server import ServerSettings
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.gateway.reload.test_change import change
from tests.gateway.rooms.rescue.test_streams import SCRIPT, engine
from tests.support.otlp_receiver import Received, otlp_receiver, plain
from tests.support.upstream import END, Wire, answer, delta, usage
from tests.support.waiting import eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
SERVER, CLIENT = Span.SpanKind.SPAN_KIND_SERVER, Span.SpanKind.SPAN_KIND_CLIENT
ERROR = Status.StatusCode.STATUS_CODE_ERROR


def traced(trace: str = TRACE, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CLIENT_SPAN}-{flags}", "tracestate": "vendor=1"}


async def reporting(wire: Wire) -> None:
    """Answer with 5 tokens, and report them; a stream in two chunks."""
    if not wire.seen.json.get("stream"):
        await wire.json(answer("a", tokens=5))
        return
    await wire.stream(delta("one "), delta("two"), usage(7, 5), END)


async def failing(wire: Wire) -> None:
    await wire.json({"error": {"message": "busy", "code": 503}}, 503)


@contextlib.asynccontextmanager
async def exporting(
    methods: dict[str, str] | None = None, otlp: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Running, Received]]:
    """Run a gateway that exports to a receiver."""
    with otlp_receiver() as received:
        telemetry = {"otlp": {"endpoint": received.url} | (otlp or {})}
        async with start_gateway(methods, telemetry=telemetry, **settings) as running:
            yield running, received


async def spans_of(received: Received, trace: str, spans: int) -> tuple[Span, list[Span]]:
    """Return the server span of a trace, and its client spans by the time they began, once there are so many."""
    await eventually(lambda: len(received.of_trace(trace)) == spans)
    (server,) = [span for span in received.of_trace(trace) if span.kind == SERVER]
    below = sorted(
        [span for span in received.of_trace(trace) if span.kind == CLIENT], key=lambda span: span.start_time_unix_nano
    )
    assert all(span.parent_span_id == server.span_id for span in below)
    assert all(
        server.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= server.end_time_unix_nano
        for span in below
    )
    return server, below


@pytest.mark.slow
async def test_the_spans_of_a_stream_continue_the_trace_of_the_client_and_the_engine_continues_theirs() -> None:
    async with exporting(behaviour=reporting, otlp={"headers": {"x-token": "secret"}}) as (running, received):
        response = await running.chat(stream=True, temperature=0.5, max_tokens=9, headers=traced())
        (seen,) = [seen for upstream in running.upstreams.values() for seen in upstream.seen]
        backend, address = response.headers["x-gateway-backend"], running.backend("a").url
        server, (client,) = await spans_of(received, TRACE, 2)
    assert server.name == "POST /v1/chat/completions"
    assert server.parent_span_id.hex() == CLIENT_SPAN
    assert seen.header("traceparent") == f"00-{TRACE}-{client.span_id.hex()}-01"
    assert seen.header("tracestate") == "vendor=1"
    assert len([name for name, _ in seen.headers if name == "traceparent"]) == 1
    of_server, of_client = plain(server.attributes), plain(client.attributes)
    expected = {
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "gateway.request_id": response.headers["x-request-id"],
        "gateway.outcome": "ok",
    }
    assert {name: of_server.get(name) for name in expected} == expected
    assert client.name == f"chat {MODEL}"
    assert client.status.code != ERROR
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.stream": True,
        "gateway.backend": backend,
        "gateway.method": "baseline",
        "gateway.policy": "round_robin",
        "gateway.reason": response.headers["x-gateway-reason"],
        "server.address": "127.0.0.1",
        "server.port": int(address.rpartition(":")[2]),
    }
    assert {name: of_client.get(name) for name in expected} == expected
    assert 0.0 < of_client["gateway.propensity"] <= 1.0
    assert of_client["gen_ai.usage.output_tokens"] == 5
    between_s = 1e-9 * (client.end_time_unix_nano - client.start_time_unix_nano)
    assert 0.0 < of_client["gen_ai.response.time_to_first_chunk"] < between_s
    assert received.headers[0]["x-token"] == "secret"
    assert received.resources[0]["service.name"] == "speculation-gateway"


@pytest.mark.slow
async def test_a_retry_has_two_spans_and_a_refusal_has_one() -> None:
    other, unanswered = "1" * 32, "2" * 32
    async with exporting() as (running, received):
        running.upstreams["a"].behaviour = failing
        response = await running.chat(headers=traced())
        assert response.headers["x-gateway-retried-from"] == "a"
        assert (await running.chat(model="no-such-model", headers=traced(other))).status_code == 404
        seen = [running.upstreams[name].seen[-1].header("traceparent") for name in "ab"]
        server, (first, second) = await spans_of(received, TRACE, 3)
        refused, nothing = await spans_of(received, other, 1)
        for upstream in running.upstreams.values():
            await upstream.die()
        assert (await running.chat(headers=traced(unanswered))).status_code >= 500
        await eventually(lambda: received.of_trace(unanswered))
    failed = next(span for span in received.of_trace(unanswered) if span.kind == SERVER)
    assert seen == [f"00-{TRACE}-{span.span_id.hex()}-01" for span in (first, second)]
    assert plain(server.attributes)["gateway.retried_from"] == "a"
    assert [plain(span.attributes)["gateway.backend"] for span in (first, second)] == ["a", "b"]
    assert first.status.code == ERROR
    assert plain(first.attributes)["error.type"] == "status"
    assert "gen_ai.usage.output_tokens" not in plain(first.attributes)
    assert second.status.code == server.status.code != ERROR
    assert plain(second.attributes)["gen_ai.usage.input_tokens"] == 7
    assert plain(second.attributes)["gen_ai.usage.output_tokens"] == 3
    assert (failed.status.code, plain(failed.attributes)["error.type"]) == (ERROR, "unanswered")
    assert not nothing
    assert plain(refused.attributes)["error.type"] == "model_not_found"
    assert plain(refused.attributes)["http.response.status_code"] == 404


@pytest.mark.slow
async def test_a_rescued_stream_has_a_span_for_each_backend_that_gave_part_of_it() -> None:
    async with exporting(rescue=True) as (running, received):
        running.upstreams["a"].behaviour = engine(events=5)
        running.upstreams["b"].behaviour = engine()
        fields: dict[str, Any] = {"stream_options": {"include_usage": True}, "stream": True}
        assert (await running.chat(headers=traced(), **fields)).text.endswith("data: [DONE]\n\n")
        server, (first, second) = await spans_of(received, TRACE, 3)
        (continued,) = [seen for seen in running.upstreams["b"].seen if seen.target != "/detokenize"]
    assert plain(server.attributes)["gateway.rescued_from"] == "a"
    assert (first.status.code, plain(first.attributes)["error.type"]) == (ERROR, "rescued")
    assert plain(second.attributes)["gateway.reason"] == "rescue"
    assert plain(second.attributes)["gen_ai.usage.output_tokens"] == len(SCRIPT)
    assert continued.header("traceparent") == f"00-{TRACE}-{second.span_id.hex()}-01"


@pytest.mark.slow
async def test_other_paths_have_spans_of_http_alone_also_after_a_reload() -> None:
    async with exporting({"a": "baseline"}) as (running, received):
        running.upstreams["a"].version = None
        assert (await running.client.get("/version", headers=traced())).status_code == 200
        server, (client,) = await spans_of(received, TRACE, 2)
        assert running.upstreams["a"].seen[-1].header("traceparent") == f"00-{TRACE}-{client.span_id.hex()}-01"
        await change(running, timeouts={"idle_s": 7.0})  # a reload keeps what reports
        other = "2" * 32
        strange = await running.client.get("/caf%C3%A9\u20ac?secret=1", headers=traced(other))
        refused, _ = await spans_of(received, other, 1)
    assert (strange.status_code, refused.name) == (400, "GET")  # one of few names, whatever clients ask for
    assert "secret" not in str(refused)
    assert (server.name, client.name) == ("GET", "GET")
    assert plain(server.attributes)["url.path"] == "/version"
    assert not [name for name in plain(client.attributes) if name.startswith("gen_ai")]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_span_has_the_scheme_of_the_gateway(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr(ServerSettings, "scheme", scheme)
    async with exporting({"a": "baseline"}) as (running, received):
        assert (await running.chat(headers=traced())).status_code == 200
        server, _ = await spans_of(received, TRACE, 2)
    assert plain(server.attributes)["url.scheme"] == scheme


@pytest.mark.slow
async def test_the_clients_decision_on_sampling_is_kept_and_others_are_drawn() -> None:
    async with exporting({"a": "baseline"}, {"sample_ratio": 0.0}) as (running, received):
        unsampled = traced(flags="00")
        await running.chat(headers=unsampled)
        await running.chat(headers={"traceparent": "00-wrong-01", "tracestate": "vendor=1"})
        await running.chat(headers=traced())
        await spans_of(received, TRACE, 2)
        passed_on, drawn, _ = running.upstreams["a"].seen
    assert len(received.spans) == 2
    assert passed_on.header("traceparent") == unsampled["traceparent"]
    assert passed_on.header("tracestate") == "vendor=1"
    assert drawn.header("traceparent").endswith("-00")
    assert drawn.header("tracestate") is None


@pytest.mark.slow
async def test_a_dead_collector_loses_spans_counts_them_and_slows_no_request(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = {"otlp": {"endpoint": f"http://127.0.0.1:{free_port('127.0.0.1')}", "queue": 5}}

    def counted(running: Running, result: str) -> float:
        page = running.gateway.metrics.page().decode()
        return total(page, "gateway_telemetry_requests_total", result=result, signal="spans")

    async with start_gateway({"a": "baseline"}, telemetry=telemetry) as running:
        for _ in range(30):
            assert (await running.chat()).status_code == 200
        await running.until(lambda: counted(running, "dropped") > 0)
    assert counted(running, "sent") == 0
    assert "spans are lost" in caplog.text
    assert counted(running, "failed") + counted(running, "dropped") == 30


@pytest.mark.slow
async def test_each_process_has_an_id_and_the_variables_of_the_sdk_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "another-name")
        for _ in range(2):
            async with start_gateway({"a": "baseline"}, telemetry={"otlp": {}}) as running:
                assert (await running.chat()).status_code == 200
    assert {resource["service.name"] for resource in received.resources} == {"another-name"}
    assert len({resource["service.instance.id"] for resource in received.resources}) == 2
    assert len(received.spans) == 4
