"""Routing, retries, hold-back, time-outs and cancelling of an exchange, without sockets or an event loop."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from backends.backend import Backend
from backends.health import Health, HealthRules, State
from backends.http.address import Address
from backends.http.client import Call
from backends.http.receiver import Receiver, UpstreamError
from backends.http.wire import WriteBatch
from backends.pool import Listener, Pool
from backends.speculation import Method
from gateway.dialects.draft_depth import with_draft_tokens
from gateway.dialects.json_body import BYTE_ORDER_MARK
from gateway.http.headers import Header
from gateway.relay.admission import begin
from gateway.relay.context import RelayContext, Timeouts
from gateway.relay.exchange import Exchange
from gateway.relay.limits import Limits
from gateway.routing.access import Access
from gateway.routing.keys import Client, Keyring, digest
from gateway.routing.model import Model, Upstream
from gateway.routing.router import Router
from gateway.routing.series import RequestSeries
from gateway.telemetry.registry import Registry
from policies.policy import policies
from tests.support.registered_metrics import value_of

CHAT = "/v1/chat/completions"
JSON_HEAD = [(b"content-type", b"application/json")]
EVENTS_HEAD = [(b"content-type", b"Text/Event-Stream; charset=utf-8")]
CHOICE = {"index": 0, "message": {}, "text": "", "finish_reason": "stop"}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}
ANSWER = json.dumps(
    {"choices": [CHOICE], "content": [], "stop_reason": "end_turn", "output": [], "data": [{}], "usage": USAGE}
).encode()
"""An answer in every API."""
FIRST, SECOND = b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n'
FINISH = b"data: %b\n\n" % json.dumps({"choices": [CHOICE]}).encode()
DONE = FINISH + b"data: [DONE]\n\n"
TIMEOUTS = Timeouts(first_byte_s=10.0, idle_s=2.0)


class RecordingReply:
    """The client's side: keeps what it is sent."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.ended = self.aborted = False
        self.source: Any = None

    def answered_by(self, source: Any) -> None:
        self.source = source

    def head(self, status: int, lines: bytes) -> None:
        self.status = status
        pairs = [line.partition(": ") for line in lines.decode().split("\r\n") if line]
        self.headers = {name: value for name, _, value in pairs}

    def data(self, chunk: bytes) -> None:
        self.chunks.append(chunk)

    def end(self) -> None:
        assert not self.ended
        self.ended = True

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        self.head(status, lines)
        self.data(body)
        self.end()

    def abort(self) -> None:
        self.aborted = True

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def code(self) -> str:
        code: str = json.loads(self.body)["error"]["code"]
        return code


class RecordingClient:
    """The backend's side: keeps what it is sent; the tests answer by calling the receiver."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.calls: list[Call] = []

    def send(self, call: Call) -> Call:
        self.calls.append(call)
        return call

    @property
    def bodies(self) -> list[bytes]:
        return [call.body for call in self.calls]

    def close(self) -> None:
        raise AssertionError("an exchange closes no client")


class RelayEvents(Listener):
    """Has the pool tell the relay, as in a gateway."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def went_down(self, backend: Backend) -> None:
        self._relay.context.abandon(backend)

    def became_ready(self, backend: Backend) -> None:
        self._relay.context.ready(backend)


class Relay:
    """A relay with backends that the tests play."""

    def __init__(self, *names: str, policy: dict[str, Any] | None = None, client: Client | None = None) -> None:
        methods = dict(zip(names, (Method.BASELINE, Method.NGRAM, Method.SUFFIX), strict=False))
        self.backends = {
            name: Backend(name, "m", method, "http://127.0.0.1:1", health=Health(State.UP))
            for name, method in methods.items()
        }
        self.clients = {name: RecordingClient(Address.parse("http://127.0.0.1:1")) for name in names}
        settings = {"name": "static", "backend": names[0]} if policy is None else policy
        kind = policies()[settings.pop("name")]
        self.registry = Registry()
        self.metrics = RequestSeries(self.registry)
        upstreams = {
            name: Upstream(backend, self.clients[name], self.metrics.of(backend))
            for name, backend in self.backends.items()
        }
        self.model = Model("m", kind(kind.Settings.model_validate(settings)), 1.0, upstreams)
        self.pool = Pool(list(self.backends.values()), HealthRules())
        self.client = client or Client("team", may_override=True)
        self.limits = Limits()
        self.context = RelayContext(
            Router({"m": self.model}, self.pool, 1_500_000),
            Access(Keyring([(digest("sk"), self.client)]), ["/*"]),
            TIMEOUTS,
            {},
            self.pool,
            self.limits,
            self.metrics,
            WriteBatch(),
        )
        self.pool.listen(RelayEvents(self))

    def send(
        self, body: bytes | None = None, path: str = CHAT, method: str = "POST", headers: list[Header] | None = None
    ) -> tuple[Exchange, RecordingReply]:
        """Begin an exchange."""
        if body is None:
            body = json.dumps({"model": "m", "messages": []}).encode()
        headers = [(b"authorization", b"Bearer sk"), *(headers or [])]
        reply = RecordingReply()
        request_headers = self.context.access.admit(method, path.encode(), headers)
        assert request_headers is not None
        begin(self.context, request_headers, body, reply)
        return reply.source, reply

    def receiver(self, name: str, number: int = -1) -> Receiver:
        """Return the receiver of a call to a backend."""
        return self.clients[name].calls[number].receiver

    def answer(
        self,
        name: str,
        body: bytes = ANSWER,
        status: int = 200,
        headers: Sequence[Header] = JSON_HEAD,
        number: int = -1,
    ) -> None:
        """Answer a call to a backend, the last one, in pieces."""
        receiver = self.receiver(name, number)
        receiver.on_head(status, [*headers, (b"content-length", b"%d" % len(body))])
        receiver.on_data(body)
        receiver.on_end()

    def begin_stream(self, name: str, *events: bytes, number: int = -1) -> Receiver:
        """Begin a stream as the answer to a call to a backend, the last one."""
        receiver = self.receiver(name, number)
        receiver.on_head(200, EVENTS_HEAD)
        for event in events:
            receiver.on_data(event)
        return receiver

    def in_flight(self) -> list[int]:
        """Return all counts of what is in flight: at backends, of the model, of the limits, and exchanges."""
        return [
            *(backend.in_flight for backend in self.backends.values()),
            self.model.traffic.in_flight,
            self.limits.in_flight,
            len(self.context.exchanges),
        ]

    def count(self, name: str, **labels: str) -> float:
        """Return a counter's sum over all labels that match."""
        return value_of(self.registry, name, **labels)


# Routing


def test_a_request_is_sent_unchanged_with_the_headers_of_the_client() -> None:
    relay = Relay("a")
    body = b'{"model": "m",  "messages": []}'
    names = (b"x-custom", b"connection", b"x-request-id", b"x-gateway-workload")
    _, reply = relay.send(body, headers=list(zip(names, (b"1", b"keep-alive", b"r", b"chat"), strict=True)))
    (call,) = relay.clients["a"].calls
    head = call.head
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:1\r\n")
    assert b"x-custom: 1\r\n" in head
    assert b"connection" not in head
    assert b"x-gateway" not in head
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{16}-r\r\n", head)
    assert b"authorization" not in head, "the gateway's key is not for the backend"
    assert (call.body, call.once) == (body, False)
    relay.answer("a")
    assert (reply.status, reply.body, reply.ended) == (200, ANSWER, True)
    assert reply.headers["x-request-id"] == "r"
    assert (reply.headers["x-gateway-backend"], reply.headers["x-gateway-reason"]) == ("a", "configured")
    assert relay.in_flight() == [0, 0, 0, 0]


def test_the_limit_of_a_key_comes_before_the_parsing_of_the_body() -> None:
    relay = Relay("a", client=Client("team", requests_per_minute=1))
    _, first = relay.send(b"no JSON")
    _, second = relay.send(b"no JSON")
    assert (first.status, first.code) == (400, "invalid_json")
    assert (second.status, second.code) == (429, "rate_limit_exceeded")
    assert relay.in_flight() == [0, 0, 0, 0]


def test_a_compressed_body_is_called_compressed() -> None:
    _, reply = Relay("a").send(gzip.compress(b"{}"))
    assert (reply.status, reply.code) == (400, "invalid_json")
    assert b"but compressed" in reply.body


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    body = BYTE_ORDER_MARK + b' {"model": "m", "messages": [], "stream": true}'
    relay = Relay("a")
    relay.model.upstreams["a"].habits.may_ask = True
    relay.send(body)
    (sent,) = relay.clients["a"].bodies
    assert sent == body.replace(b"{", b'{"stream_options":{"include_usage":true},')
    assert [*relay.context.router.check(body)] == [None], "its values are counted"
    assert with_draft_tokens(body, 2) == body.replace(b"{", b'{"vllm_xargs":{"draft_tokens":2},')


@pytest.mark.parametrize("head", [JSON_HEAD, EVENTS_HEAD])
def test_an_answer_that_is_compressed_unasked_is_passed_on_and_counted(
    head: list[Header], caplog: pytest.LogCaptureFixture
) -> None:
    relay = Relay("a")
    for _ in range(2):
        _, reply = relay.send()
        relay.answer("a", b"\x1f\x8b", headers=[*head, (b"content-encoding", b"gzip")])
        assert (reply.status, reply.body, reply.headers["content-encoding"]) == (200, b"\x1f\x8b", "gzip")
    assert relay.count("gateway_implausible_reports_total", backend="a", what="content-encoding") == 2
    assert caplog.messages == ["m/a reports what cannot be, which is ignored: content-encoding"]


def test_parameters_that_only_a_baseline_takes_keep_a_request_there() -> None:
    relay = Relay("a", "b", policy={"name": "static", "backend": "b"})
    fields = ('"min_p": 0.1', '"logit_bias": {"1": 5}')
    bodies = [b'{"model": "m", "messages": [], %b}' % each.encode() for each in fields]
    for body in bodies:
        relay.send(body)
    assert relay.clients["a"].bodies == bodies
    relay.backends["a"].health = Health(State.DOWN)
    _, reply = relay.send(bodies[0])
    assert (reply.status, b"min_p" in reply.body) == (503, True)


def test_a_parameter_at_which_a_speculating_engine_fails_is_sent_to_none() -> None:
    relay = Relay("a", "b", policy={"name": "static", "backend": "b"})
    relay.send(b'{"model": "m", "label_token_ids": [5, 6]}', "/generative_scoring")
    assert [len(client.calls) for client in relay.clients.values()] == [1, 0]
    bound: Header = (b"x-gateway-backend", b"b")
    _, reply = relay.send(b'{"model": "m", "label_token_ids": [5, 6]}', "/generative_scoring", headers=[bound])
    assert (reply.status, len(relay.clients["b"].calls)) == (400, 0), "not if the client asks for it either"
    relay = Relay("a")
    relay.backends["a"].method = Method.NGRAM
    for body in (b'{"model": "m", "messages": [], "logprob_token_ids": [5]}', b'{"model": "m", "min_p": 1}'):
        _, reply = relay.send(body)
        assert (reply.status, b"logprob_token_ids needs" in reply.body) == (
            (0, False) if b"min_p" in body else (400, True)
        )
    assert relay.clients["a"].bodies == [body], "which an engine itself refuses"


@pytest.mark.parametrize("header", [(b"x-gateway-backend", b"b"), (b"x-gateway-method", b"ngram")])
def test_headers_choose_the_backend(header: Header) -> None:
    relay = Relay("a", "b")
    _, reply = relay.send(headers=[header])
    relay.answer("b")
    assert (reply.status, reply.headers["x-gateway-policy"]) == (200, "override")
    _, refused = relay.send(headers=[(header[0], b"eagle3")])
    assert (refused.status, b"a (baseline), b (ngram)" in refused.body) == (400, True)
    assert relay.count("gateway_requests_total", outcome="client_error") == 1


# Retries


@pytest.mark.parametrize("kind", ["connect", "broken", "garbage"])
def test_a_request_without_an_answer_is_sent_to_another_backend(kind: str) -> None:
    relay = Relay("a", "b")
    _, reply = relay.send()
    relay.receiver("a").on_error(UpstreamError(kind, "failed"))
    assert reply.chunks == []
    relay.answer("b")
    assert (reply.status, reply.body) == (200, ANSWER)
    assert (reply.headers["x-gateway-backend"], reply.headers["x-gateway-retried-from"]) == ("b", "a")
    assert relay.count("gateway_retries_total", backend="a", kind=kind) == 1
    assert relay.in_flight() == [0, 0, 0, 0, 0]


def test_a_request_is_sent_at_most_twice() -> None:
    relay = Relay("a", "b", "c")
    _, reply = relay.send()
    relay.receiver("a").on_error(UpstreamError("broken", "closed the connection"))
    (second,) = [name for name in "bc" if relay.clients[name].calls]
    relay.receiver(second).on_error(UpstreamError("broken", "closed the connection"))
    assert (reply.status, reply.code) == (502, "backend_broken")
    assert sum(len(client.calls) for client in relay.clients.values()) == 2
    assert relay.in_flight() == [0] * 6


@pytest.mark.parametrize("status", [400, 504])
def test_an_error_of_the_client_and_a_time_out_behind_the_backend_are_passed_on(status: int) -> None:
    relay = Relay("a", "b")
    _, reply = relay.send()
    relay.answer("a", b'{"error": "bad"}', status)
    assert (reply.status, reply.body) == (status, b'{"error": "bad"}')
    assert relay.clients["b"].calls == [], "nor is it run again"


@pytest.mark.parametrize(
    ("name", "served"), [("m-sql", "m"), ("m.1", "m, x"), ("org/m", "x, m"), ("x", "m"), ("m", "x")]
)
def test_only_an_engine_that_lacks_its_model_itself_has_failed(name: str, served: str) -> None:
    relay = Relay("a")
    _, reply = relay.send()
    message = f"The model `{name}` does not exist. Valid aliases: {served}."
    error = json.dumps({"error": {"message": message, "param": "model"}}).encode()
    relay.answer("a", error, 404)
    assert (reply.status, reply.body == error) == ((503, False) if name == "m" else (404, True))


@pytest.mark.parametrize(
    ("method", "kind", "sent"), [("POST", "broken", 0), ("POST", "connect", 1), ("GET", "broken", 1)]
)
def test_other_paths_are_retried_only_if_that_has_no_effect(method: str, kind: str, sent: int) -> None:
    relay = Relay("a", "b")
    relay.send(b"", "/tokenize", method)
    assert relay.clients["a"].calls[0].once is (method == "POST")
    relay.receiver("a").on_error(UpstreamError(kind, "failed"))
    assert len(relay.clients["b"].calls) == sent


def test_requests_that_wait_for_a_backend_that_goes_down_are_sent_to_another_one() -> None:
    relay = Relay("a", "b")
    _, waiting = relay.send()
    _, streaming = relay.send()
    relay.begin_stream("a", FIRST)
    relay.backends["a"].health = Health(State.DOWN)
    relay.context.abandon(relay.backends["a"])
    assert len(relay.clients["b"].calls) == 1
    assert (waiting.chunks, streaming.chunks, streaming.ended) == ([], [FIRST], False)


# Evidence against a backend


def body_of(number: int) -> bytes:
    return json.dumps({"model": "m", "messages": [], "seed": number}).encode()


def fail(relay: Relay, name: str, fault: str) -> None:
    """Fail the last call to a backend: by a cut (`broken`), nonsense (`garbage`), a status, or another content type."""
    receiver = relay.receiver(name)
    if fault in {"broken", "garbage"}:
        receiver.on_error(UpstreamError(fault, "failed"))
    elif fault.isdigit():
        relay.answer(name, b'{"error": "boom"}', int(fault))
    elif fault == "stream error":
        receiver.on_head(200, EVENTS_HEAD)
        receiver.on_data(b'data: {"error": {"code": 500}}\n\n')
        if relay.backends[name].in_flight:  # not sent to another backend
            receiver.on_end()
    else:
        receiver.on_head(200, [(b"content-type", fault.encode())])


FAULTS = ["broken", "garbage", "500", "502", "text/html", "stream error"]


@pytest.mark.parametrize("fault", FAULTS)
def test_three_requests_that_another_backend_served_eject_the_one_that_failed_them(fault: str) -> None:
    relay = Relay("a", "b")
    for number in range(3):
        assert relay.backends["a"].health.state is State.UP
        relay.send(body_of(number))
        fail(relay, "a", fault)
        assert relay.pool.watch(relay.backends["a"]).wake.is_set(), "the probe is to look at once"
        assert not relay.pool.watch(relay.backends["b"]).wake.is_set()
        relay.answer("b")
    assert relay.backends["a"].health.state is State.EJECTED
    assert relay.backends["b"].health.state is State.UP


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_is_repeated_ejects_no_backend(fault: str) -> None:
    relay = Relay("a", "b")
    for _ in range(9):
        relay.send(body_of(1))
        fail(relay, "a", fault)
        relay.answer("b")
    assert relay.backends["a"].health.state is State.UP


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_that_no_backend_serves_eject_none(fault: str) -> None:
    relay = Relay("a", "b", "c")
    for number in range(9):
        relay.send(body_of(number))
        fail(relay, "a", fault)
        (second,) = [name for name in "bc" if len(relay.clients[name].calls) and relay.backends[name].in_flight]
        fail(relay, second, fault)
    assert [backend.health.state for backend in relay.backends.values()] == [State.UP] * 3
    assert relay.in_flight() == [0] * 6


@pytest.mark.parametrize("status", [400, 404, 429])
def test_an_engine_that_refuses_a_request_does_not_confirm_that_another_one_was_at_fault(status: int) -> None:
    relay = Relay("a", "b")
    for number in range(9):
        relay.send(body_of(number))
        fail(relay, "a", "500")
        relay.answer("b", b'{"error": "no"}', status)
    assert relay.backends["a"].health.state is State.UP


@pytest.mark.parametrize(("is_client_slow", "state"), [(False, State.EJECTED), (True, State.UP)])
def test_streams_of_three_requests_that_break_off_eject(is_client_slow: bool, state: State) -> None:
    relay = Relay("a", "b")
    _, waiting = relay.send(body_of(9))
    for number in range(3):
        assert relay.backends["a"].health.state is State.UP
        exchange, _ = relay.send(body_of(number))
        relay.begin_stream("a", FIRST)
        if is_client_slow:
            exchange.pause()
            exchange.resume()
        relay.receiver("a").on_error(UpstreamError("broken", "closed the connection"))
    assert relay.backends["a"].health.state is state
    relay.answer("a", number=0)
    assert (waiting.status, waiting.headers["x-gateway-backend"]) == (200, "a"), "it may answer what it has"


@pytest.mark.parametrize(("method", "path"), [("OPTIONS", CHAT), ("HEAD", CHAT), ("POST", "/tokenize"), ("GET", "/x")])
def test_requests_that_are_not_for_inference_are_passed_through_and_not_judged(method: str, path: str) -> None:
    relay = Relay("a", "b")
    for number in range(9):
        _, reply = relay.send(body_of(number), path, method)
        relay.receiver("a").on_head(200, [(b"content-type", b"text/plain")])
        relay.receiver("a").on_data(b"" if method == "HEAD" else b"OK")
        relay.receiver("a").on_end()
        assert (reply.status, reply.body) == (200, b"" if method == "HEAD" else b"OK")
        relay.send(body_of(number), path, method)
        relay.receiver("a").on_error(UpstreamError("broken", "closed the connection"))
        if relay.backends["b"].in_flight:
            relay.answer("b")
    assert relay.backends["a"].health.state is State.UP


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "GET"])
def test_a_body_without_meaning_is_not_read(method: str) -> None:
    relay = Relay("a")
    relay.send(b'{"model": "another"}', method=method)
    assert len(relay.clients["a"].calls) == 1


def test_embeddings_as_bytes_are_passed_through() -> None:
    relay = Relay("a")
    _, reply = relay.send(b'{"model": "m", "input": "x", "encoding_format": "bytes"}', "/v1/embeddings")
    relay.answer("a", b"\x00\x01", headers=[(b"content-type", b"application/octet-stream")])
    assert (reply.status, reply.body) == (200, b"\x00\x01")


@pytest.mark.parametrize(
    "content_type", [b"Application/JSON", b"application/json; charset=UTF-8", b"application/problem+json"]
)
def test_json_is_recognized_by_its_media_type(content_type: bytes) -> None:
    relay = Relay("a")
    for body, status in ((ANSWER, 200), (b"not JSON", 502)):
        _, reply = relay.send()
        relay.answer("a", body, headers=[(b"content-type", content_type)])
        assert reply.status == status


# Redirects


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/docs/", 307), ("POST", CHAT, 307), ("GET", "/v1/x", 201)]
)
def test_a_location_within_the_backend_is_one_within_the_gateway(method: str, path: str, status: int) -> None:
    relay = Relay("a")
    _, reply = relay.send(path=path, method=method)
    names = (b"location", b"content-location")
    relay.answer("a", b"", status, [(name, b"http://127.0.0.1:1/docs?x=1") for name in names])
    assert reply.status == status
    assert [reply.headers[name.decode()] for name in names] == ["/docs?x=1"] * 2


def test_the_address_of_another_server_is_not_passed_on() -> None:
    relay, elsewhere = Relay("a", "b"), [(b"location", b"http://10.0.0.7/v1/x")]
    _, redirected = relay.send(path="/v1/x", method="GET")
    relay.receiver("a").on_head(302, elsewhere)
    assert (redirected.status, redirected.code) == (502, "backend_redirect")
    assert b"10.0.0.7" not in redirected.body
    assert relay.clients["b"].calls == []
    _, made = relay.send(path="/v1/x", method="GET")
    relay.answer("a", b"", 201, elsewhere)
    assert (made.status, made.headers.get("location"), redirected.headers.get("location")) == (201, None, None)


# Request ids


@pytest.mark.parametrize("status", [200, 400, 502])
@pytest.mark.parametrize(
    ("path", "is_expected"), [("/v1/messages", True), ("/v1/messages/count_tokens", True), (CHAT, False)]
)
def test_answers_of_the_messages_api_have_its_request_id(path: str, is_expected: bool, status: int) -> None:
    relay = Relay("a")
    _, reply = relay.send(path=path, headers=[(b"x-request-id", b"r1")])
    if status == 502:
        fail(relay, "a", "broken")
    else:
        relay.answer("a", ANSWER, status, [*JSON_HEAD, (b"request-id", b"of the engine")])
    assert (reply.status, reply.headers["x-request-id"]) == (status, "r1")
    assert reply.headers.get("request-id") == ("r1" if is_expected else None)
    if status == 502:
        assert json.loads(reply.body).get("type") == ("error" if is_expected else None)


# Hold-back


def test_a_stream_is_held_until_its_first_event_and_then_passed_on_at_once() -> None:
    relay = Relay("a")
    _, reply = relay.send()
    receiver = relay.begin_stream("a", FIRST[:5])
    assert reply.status == 0
    receiver.on_data(FIRST[5:] + SECOND[:4])
    assert (reply.status, reply.chunks) == (200, [FIRST])
    receiver.on_data(SECOND[4:])
    receiver.on_data(DONE)
    assert reply.chunks == [FIRST, SECOND, DONE]
    receiver.on_end()
    assert reply.ended
    assert relay.count("gateway_itl_seconds_count") == 2


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        (EVENTS_HEAD, b"<html>sorry</html>\n\n"),
        (EVENTS_HEAD, b'data: {"error": {"code": 503}}\n\n'),
        (JSON_HEAD, b"<html>sorry</html>"),
    ],
)
def test_an_invalid_answer_is_not_passed_on(headers: list[Header], data: bytes) -> None:
    relay = Relay("a", "b")
    _, reply = relay.send()
    receiver = relay.receiver("a")
    receiver.on_head(200, headers)
    receiver.on_data(data)
    if not relay.clients["b"].calls:
        receiver.on_end()
    relay.answer("b")
    assert (reply.status, reply.body) == (200, ANSWER)


LAST_EVENTS = {
    CHAT: DONE,
    "/v1/messages": b'event: message_delta\ndata: {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}\n\n'
    b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
}


@pytest.mark.parametrize("ending", ["broken", "garbage", "silence", "stop", "client gone"])
@pytest.mark.parametrize("path", LAST_EVENTS)
def test_a_stream_is_complete_once_its_last_event_has_been_passed_on(path: str, ending: str) -> None:
    relay = Relay("a", "b")
    for number in range(3):
        exchange, reply = relay.send(body_of(number), path)
        receiver = relay.begin_stream(
            "a", FIRST, b"data: %b\n\n" % json.dumps({"choices": [], "usage": USAGE}).encode(), LAST_EVENTS[path]
        )
        if ending == "silence":
            exchange.check_silence(later(2.5))
        elif ending == "stop":
            relay.context.stop()
        elif ending == "client gone":
            exchange.client_gone()
        else:
            receiver.on_error(UpstreamError(ending, "failed"))
        assert reply.chunks[-1] == LAST_EVENTS[path]
        assert reply.ended is (ending != "client gone")
    assert relay.count("gateway_requests_total", outcome="ok") == 3
    assert relay.count("gateway_key_tokens_total", key="team") == 30
    assert relay.backends["a"].health.state is State.UP
    assert relay.in_flight() == [0, 0, 0, 0, 0]


# Time-outs and cancelling


def later(seconds: float) -> float:
    return time.perf_counter() + seconds


def test_a_backend_that_sends_no_first_byte_is_given_up() -> None:
    relay = Relay("a", "b")
    exchange, reply = relay.send(b'{"model": "m", "messages": [{"role": "user", "content": "a prompt"}]}')
    exchange.check_silence(later(9.0))
    assert relay.clients["b"].calls == []
    exchange.check_silence(later(10.5))
    assert (reply.status, reply.code) == (504, "backend_timeout")
    assert relay.clients["b"].calls == [], "it may be slow: a second run would double the load"
    assert relay.count("gateway_key_tokens_total") == 0, "the gateway is to blame"
    assert relay.in_flight() == [0, 0, 0, 0, 0]


def test_after_the_first_byte_the_limit_is_that_of_an_idle_stream() -> None:
    relay = Relay("a", "b")
    exchange, reply = relay.send()
    receiver = relay.begin_stream("a")
    exchange.check_silence(later(2.5))
    assert reply.status == 0, "headers alone are not a first byte: an engine sends them before it prefills"
    receiver.on_data(FIRST)
    exchange.check_silence(later(1.5))
    assert not reply.ended
    exchange.check_silence(later(2.5))
    assert reply.ended
    assert b'"code":"backend_timeout"' in reply.chunks[-1]


def test_an_answer_that_is_paused_for_a_slow_client_is_not_silent() -> None:
    relay = Relay("a")
    exchange, reply = relay.send()
    relay.begin_stream("a", FIRST)
    exchange.pause()
    exchange.check_silence(later(3600.0))
    assert not reply.ended
    exchange.resume()
    exchange.check_silence(later(1.5))
    assert not reply.ended


def test_a_backend_that_fails_its_probes_gets_five_seconds() -> None:
    relay = Relay("a", "b")
    exchange, _ = relay.send()
    relay.backends["a"].health = Health(State.DOWN)
    exchange.check_silence(later(4.5))
    assert relay.clients["b"].calls == []
    exchange.check_silence(later(5.5))
    assert len(relay.clients["b"].calls) == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_leaves_cancels_the_call(has_begun: bool) -> None:
    relay = Relay("a")
    exchange, reply = relay.send()
    if has_begun:
        relay.begin_stream("a", FIRST)
    exchange.client_gone()
    exchange.client_gone()
    assert relay.in_flight() == [0, 0, 0, 0]
    assert relay.count("gateway_requests_total", outcome="cancelled") == 1
    assert not reply.ended
    assert not relay.backends["a"].health.strikes


def test_the_end_of_the_drain_time_ends_what_is_in_flight() -> None:
    relay = Relay("a", "b")
    _, waiting = relay.send()
    _, streaming = relay.send()
    relay.begin_stream("a", FIRST)
    relay.context.stop()
    assert (waiting.status, waiting.code) == (503, "gateway_stopping")
    assert b'"code":"gateway_stopping"' in streaming.chunks[-1]
    assert relay.in_flight() == [0, 0, 0, 0, 0]
