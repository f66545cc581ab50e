"""The exchange: passes a request to a backend, and the answer back to the client.

An answer is passed on only once it is known to be valid: a stream after its first complete event, any other answer of
an inference endpoint when it is complete. Until then the request can be retried on another backend, once.
"""

from __future__ import annotations

import logging
import time

import orjson

from backends.backend import Backend, State
from backends.http.client import AnswerHead, Call, HeaderList, UpstreamError
from gateway.http.errors import GatewayError, endpoint_of
from gateway.http.headers import lines_for_client, lines_of, upstream_head
from gateway.http.sse import EventStream, is_engine_error, is_event_stream
from gateway.http.usage import Usage, read_usage
from gateway.recorder import FinishedRequest, RequestNotes
from gateway.relay.accounting import EndedExchange, Timing, account, count_plain, is_plain
from gateway.relay.context import Inbound, RelayContext, Reply
from gateway.routing.model import Upstream
from gateway.routing.router import RoutedRequest
from gateway.shadow import AnswerBuffer
from policies.features.request import Endpoint
from policies.policy import Decision, Outcome

log = logging.getLogger(__name__)

_MAX_HELD_BYTES = 1 << 20
_RETRYABLE = frozenset({500, 502, 503, 504})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})  # sent with a content length even if the body is empty
_ANSWERED = frozenset({"ok", "cancelled", "interrupted"})
_DOWN_TIMEOUT_S = 5.0  # of an exchange whose backend fails its health checks


class Exchange:
    """One request from arrival to outcome; the receiver of its upstream call."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_call",
        "_decision",
        "_first_s",
        "_head_sent",
        "_headers",
        "_hold",
        "_inbound",
        "_last_read_s",
        "_last_s",
        "_notes",
        "_relay",
        "_reply",
        "_request_headers",
        "_request_id",
        "_retried",
        "_routed",
        "_status",
        "_stream",
        "_text_buffer",
        "_tried",
        "_upstream",
        "endpoint",
    )

    def __init__(self, relay: RelayContext, inbound: Inbound, reply: Reply) -> None:
        self._relay = relay
        self._inbound = inbound
        self._request_headers = inbound.request_headers
        self._reply = reply
        self._request_id = inbound.request_headers.request_id or relay.new_request_id()
        self.endpoint = endpoint_of(inbound.path)
        self._routed: RoutedRequest | None = None
        self._decision: Decision | None = None
        self._upstream: Upstream | None = None
        self._call: Call | None = None
        self._tried: list[str] = []  # names of backends that failed the request
        self._retried: tuple[Backend, str] | None = None  # the first backend, and the kind of its failure
        self._first_s = 0.0
        self._last_s = 0.0
        self._last_read_s = inbound.arrived_s
        self._notes = relay.recorder.start_notes(self.endpoint) if relay.recorder is not None else None
        self._text_buffer: AnswerBuffer | None = None  # the answer, if it is used for shadow drafting
        self._reset_answer()

    def _reset_answer(self) -> None:
        """Discard an answer that was not passed on."""
        self._status = 0
        self._headers: HeaderList = []
        self._head_sent = False
        self._stream: EventStream | None = None
        self._hold = False  # whether the answer is held until it is complete
        self._body: list[bytes] = []
        self._body_bytes = 0

    # Called by the frontend

    def begin(self) -> None:
        """Route the request and send it to a backend, or answer with an error."""
        try:
            self._begin()
        except Exception:  # a defect: caught here so that both frontends answer alike
            log.exception("a request could not be sent on")
            error = GatewayError(500, "The gateway failed; see its log.", code="gateway_failed")
            if self in self._relay.exchanges:
                self.end_with_error(error)
            else:
                self._relay.metrics.count_refusal()
                self._answer(error)

    def _begin(self) -> None:
        relay, inbound, request_headers = self._relay, self._inbound, self._request_headers
        now_s = time.monotonic()
        try:
            routed = relay.router.route(
                inbound.path,
                request_headers.method,
                inbound.body,
                request_headers.client,
                request_headers.routing_headers,
                now_s,
                keep_bytes=self._notes.keep_prompt_bytes if self._notes is not None else 0,
            )
            relay.limits.enter(request_headers.client)
        except GatewayError as error:
            relay.metrics.count_refusal()
            self._answer(error)
            return
        self._routed = routed
        routed.model.traffic.arrive(now_s)
        routed.model.traffic.in_flight += 1
        if (shadow := routed.model.shadow) is not None:
            self._text_buffer = shadow.begin(routed.features, inbound.body)
        relay.exchanges.add(self)
        try:
            candidates = self._candidates()
        except GatewayError as error:
            self._refuse(error)
            return
        self._send(candidates)

    def client_gone(self) -> None:
        """Cancel the request, since its client has disconnected."""
        if self in self._relay.exchanges:
            self._cancel_call()
            self._finish(499, "cancelled")

    def pause(self) -> None:
        """Pause reading the answer while the client is slow to receive it."""
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        """Resume reading the answer."""
        if self._call is not None:
            self._last_read_s = time.perf_counter()  # the pause does not count as silence of the backend
            self._call.resume()

    # Sending to a backend

    def _candidates(self) -> list[Backend]:
        assert self._routed is not None
        return self._relay.router.candidates(
            self._routed, self._request_headers.client, self._request_headers.routing_headers, self._tried
        )

    def _send(self, candidates: list[Backend]) -> None:
        relay, inbound, request_headers, routed = self._relay, self._inbound, self._request_headers, self._routed
        assert routed is not None
        decision = relay.router.choose(routed, candidates, request_headers.routing_headers)
        upstream = routed.model.upstreams[decision.backend]
        self._decision, self._upstream = decision, upstream
        if self._notes is not None:
            self._notes.note_candidates(candidates)
        method, body, api_key = request_headers.method, inbound.body, upstream.backend.api_key
        key_lines = b"" if api_key is None else b"authorization: Bearer %b\r\n" % api_key.encode()
        head = upstream_head(
            method,
            inbound.target,
            authority=upstream.client.address.authority,
            lines=request_headers.lines,
            key_lines=request_headers.key_lines if api_key is None and relay.keyring.is_open else key_lines,
            request_id=self._request_id,
            body_bytes=len(body) if body or method in _WITH_BODY else None,
        )
        upstream.backend.in_flight += 1
        self._last_read_s = time.perf_counter()
        if self._tried:
            self._reset_answer()
        else:
            relay.metrics.overhead.labels(routed.model.name).observe(self._last_read_s - inbound.arrived_s)
        relay.metrics.decisions.labels(routed.model.name, decision.policy, decision.reason).inc()
        self._call = upstream.client.send(head, body, self, head_only=method == "HEAD", whole=self)

    def _release(self) -> None:
        """Release the backend at the end of the call."""
        if self._upstream is not None and self._call is not None:
            self._upstream.backend.in_flight -= 1
        self._call = None

    def _cancel_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._release()

    def _retry(self, kind: str) -> bool:
        """Send the request to another backend; return whether it was sent.

        It is not sent if part of the answer was passed on, if it was retried before, or if it names its backend.
        """
        upstream = self._upstream
        assert upstream is not None
        if self._head_sent or self._tried or self._request_headers.routing_headers.backend:
            return False
        if (
            self.endpoint is Endpoint.OTHER
            and self._request_headers.method not in {"GET", "HEAD"}
            and kind != "connect"
        ):
            return False  # the request may already have had an effect
        self._tried.append(upstream.backend.name)
        try:
            candidates = self._candidates()
        except GatewayError:
            self._tried.clear()
            return False
        self._retried = (upstream.backend, kind)
        self._cancel_call()
        self._relay.metrics.retries.labels(*upstream.metrics.labels, kind).inc()
        self._send(candidates)
        return True

    def backend_is_down(self, backend: Backend) -> None:
        """Retry on another backend if this exchange waits for the first byte from `backend`."""
        if self._call is None or self._upstream is None or self._upstream.backend is not backend or self._head_sent:
            return
        if not self._retry("down"):
            self._fail("down", backend.state_reason)

    def check_silence(self, now_s: float) -> None:
        """Retry or fail if the backend has been silent for too long."""
        if self._call is None or self._call.paused:
            return
        assert self._upstream is not None
        timeouts = self._relay.timeouts
        limit_s = timeouts.idle_s if self._head_sent or self._body else timeouts.first_byte_s
        if self._upstream.backend.state is State.DOWN:
            limit_s = min(limit_s, _DOWN_TIMEOUT_S)
        if now_s - self._last_read_s > limit_s:
            self._retry_or_fail("timeout", f"sent nothing for {limit_s:g} s")

    # Called by the upstream client

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Pass on an answer that was read in one piece."""
        upstream, call = self._upstream, self._call
        assert upstream is not None
        lines = upstream.lines_of_answer(head)
        if upstream.answers_json and self.endpoint is not Endpoint.OTHER:
            try:
                document = orjson.loads(body)
            except orjson.JSONDecodeError:
                pass  # handled below like any other answer
            else:
                usage = read_usage(document)
                self._status = head.status
                self._keep_answer(body, document)
                self._head_sent = True
                lines = b"%bx-request-id: %b\r\n%b" % (lines, self._request_id, self._own_lines())
                self._reply.whole(head.status, lines, body)
                self._succeed(usage)
                return
        headers = [header for header in head.headers if header[0] != b"content-length"]
        self.on_head(head.status, [*headers, (b"content-length", b"%d" % len(body))])
        if self._call is call and body:
            self.on_data(body)
        if self._call is call:
            self.on_end()

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Decide by the head how much of the answer is held before it is passed on."""
        self._last_read_s = time.perf_counter()
        self._status = status
        self._headers = headers
        if self.endpoint is Endpoint.OTHER:
            return
        by_name = dict(headers)
        content_type = by_name.get(b"content-type", b"")
        encoded = b"content-encoding" in by_name
        if status == 200 and content_type.startswith(b"text/event-stream"):
            self._stream = None if encoded else EventStream(self.endpoint)
            return
        length = by_name.get(b"content-length", b"")
        self._hold = not encoded and (not length or (length.isdigit() and int(length) <= _MAX_HELD_BYTES))
        if status == 200 and not content_type.startswith(b"application/json"):
            received = content_type.decode("latin-1") or "no content type"
            self._retry_or_fail("garbage", f"answered with {received}, not JSON or an event stream")

    def on_data(self, data: bytes) -> None:
        """Pass on bytes of the answer, or hold them until the answer is known to be valid."""
        now_s = time.perf_counter()
        previous_s, self._last_read_s = self._last_read_s, now_s
        stream = self._stream
        if stream is None:
            self._on_plain_data(data)
            return
        data = stream.feed(data)
        if not data:
            return
        if self._head_sent:
            assert self._upstream is not None
            self._upstream.metrics.itl.observe(now_s - previous_s)
            self._last_s = now_s
            if self._text_buffer is not None:
                self._text_buffer.append(data)
            if (notes := self._notes) is not None:
                notes.chunks.append(now_s)
                if notes.answer is not None:
                    notes.keep(data)
            self._reply.data(data)
            return
        if not is_event_stream(data):
            self._retry_or_fail("garbage", "answered with something other than events")
            return
        if is_engine_error(data) and self._retry("status"):
            return
        self._first_s = self._last_s = now_s
        if self._text_buffer is not None:
            self._text_buffer.append(data)
        if self._notes is not None:
            self._notes.chunks.append(now_s)
            self._notes.keep(data)
        self._note_location(data)
        self._send_head()
        self._reply.data(data)

    def _on_plain_data(self, data: bytes) -> None:
        if self._hold:
            self._body.append(data)
            self._body_bytes += len(data)
            if self._body_bytes <= _MAX_HELD_BYTES:
                return
            self._hold = False  # too long to hold
            data = b"".join(self._body)
        if not self._head_sent:
            self._send_head()
        self._reply.data(data)

    def on_end(self) -> None:
        """Pass on the end of the answer, and finish the exchange."""
        if self._status in _RETRYABLE and self._retry("status"):
            return
        usage: Usage | None = None
        if self._hold:
            body, document = b"".join(self._body), None
            if self._status == 200:
                try:
                    document = orjson.loads(body)
                except orjson.JSONDecodeError:
                    self._retry_or_fail("garbage", "answered with something that is not JSON")
                    return
                usage = read_usage(document)
            self._keep_answer(body, document)
            self._send_head()
            if body:
                self._reply.data(body)
        elif self._stream is not None:
            rest = self._stream.rest()
            if not self._head_sent and not rest:
                self._retry_or_fail("broken", "ended a stream without an event")
                return
            if not self._head_sent:
                self._send_head()
            if rest:
                self._reply.data(rest)
            usage = next(filter(None, map(read_usage, self._stream.last_documents())), None)
        elif not self._head_sent:
            self._send_head()
        self._reply.end()
        self._succeed(usage)

    def _keep_answer(self, body: bytes, document: object) -> None:
        self._note_location(body)
        if self._text_buffer is not None:
            self._text_buffer.append(body)
        if self._notes is not None:
            self._notes.keep_document(self.endpoint, document, len(body))

    def _note_location(self, beginning: bytes) -> None:
        if self.endpoint is Endpoint.RESPONSES and self._upstream is not None:
            self._relay.router.locations.note_answer(beginning, self._upstream.backend.name)

    def on_error(self, error: UpstreamError) -> None:
        """Retry on another backend, or fail."""
        self._retry_or_fail(error.kind, str(error))

    # Ending the exchange

    def _retry_or_fail(self, kind: str, message: str) -> None:
        assert self._upstream is not None
        if kind == "exhausted":  # the gateway's own limit: no backend is at fault, and none can be reached
            self._fail(kind, message)
            return
        backend = self._upstream.backend
        if not self._retry(kind):
            self._fail(kind, message)
        self._relay.pool.report_failure(backend, kind, message)

    def _fail(self, kind: str, message: str) -> None:
        assert self._upstream is not None
        message = f"Backend {self._upstream.backend.name} {message}"
        if self._head_sent:
            message += ": this answer is not complete"
        status = {"timeout": 504, "connect": 503, "down": 503, "exhausted": 503}.get(kind, 502)
        retry_after_s = 2.0 if status == 503 else None
        error = GatewayError(
            status, f"{message}. Send the request again.", code=f"backend_{kind}", retry_after_s=retry_after_s
        )
        self.end_with_error(error)

    def end_with_error(self, error: GatewayError) -> None:
        """End with an error: as the answer, as an event of a stream that has begun, else by closing the connection."""
        if not self._head_sent:
            self._refuse(error)
            return
        self._cancel_call()
        if self._stream is not None:
            self._reply.data(error.event(self.endpoint))
            self._reply.end()
        else:
            self._reply.abort()
        self._finish(error.status, "interrupted")

    def _refuse(self, error: GatewayError) -> None:
        self._cancel_call()
        self._answer(error)
        self._finish(error.status, "unanswered")

    def _answer(self, error: GatewayError) -> None:
        headers, body = error.answer(self.endpoint, self._request_id)
        self._reply.head(error.status, lines_of(headers) + self._own_lines())
        self._reply.data(b"" if self._request_headers.method == "HEAD" else body)
        self._reply.end()

    def _send_head(self) -> None:
        self._head_sent = True
        lines = lines_for_client(self._headers)
        self._reply.head(self._status, b"%bx-request-id: %b\r\n%b" % (lines, self._request_id, self._own_lines()))

    def _own_lines(self) -> bytes:
        decision, upstream = self._decision, self._upstream
        if decision is None or upstream is None:
            return b""
        return upstream.lines_of_choice(decision, self._tried[0] if self._tried else "")

    def _succeed(self, usage: Usage | None) -> None:
        assert self._upstream is not None
        self._release()
        status, pool = self._status, self._relay.pool
        if status < 500:
            pool.report_success(self._upstream.backend)
            if self._retried is not None and self._retried[1] == "status":
                # Another backend could serve the request, so the first one was at fault.
                pool.report_failure(self._retried[0], "status", "answered 5xx to a request that another backend served")
        outcome = "ok" if status < 400 else "client_error" if status < 500 else "engine_error"
        self._finish(status, outcome, usage)

    def _finish(self, status: int, outcome: str, usage: Usage | None = None) -> None:
        """Count the exchange, and pass its outcome to policy, listeners, shadow drafting and recorder."""
        relay, routed = self._relay, self._routed
        assert routed is not None
        relay.exchanges.discard(self)
        routed.model.traffic.in_flight -= 1
        tokens = 0
        result: Outcome | None = None
        if self._upstream is None or self._decision is None:
            relay.metrics.requests.labels(routed.model.name, "", "", outcome).inc()
        else:
            self._upstream.metrics.outcomes[outcome].inc()
            if self.endpoint is Endpoint.OTHER or outcome not in _ANSWERED:
                pass
            elif usage is not None and self._is_only_counted() and is_plain(usage, routed.model):
                tokens = count_plain(self._upstream, usage, time.perf_counter() - self._inbound.arrived_s)
            else:
                timing = Timing(self._inbound.arrived_s, self._first_s, self._last_s, time.perf_counter())
                ended = EndedExchange(routed, self._decision, self._upstream, status, timing, usage, self._stream)
                result = account(ended, relay.metrics)
                tokens = result.prompt_tokens + result.output_tokens
                for listener in relay.listeners:
                    listener(result)
                if self._text_buffer is not None and status == 200 and outcome == "ok":
                    self._add_to_shadow_drafting(self._text_buffer, routed, result)
        client = self._request_headers.client
        relay.limits.leave(client, tokens)
        if tokens:
            relay.metrics.keys.labels(client.name).inc(tokens)
        if self._notes is not None:
            self._record(self._notes, routed, status, outcome, result, usage)

    def _is_only_counted(self) -> bool:
        """Return whether the answer came in one piece and neither recorder, shadow drafting nor a listener uses it."""
        return self._stream is None and self._notes is None and self._text_buffer is None and not self._relay.listeners

    def _add_to_shadow_drafting(self, answer: AnswerBuffer, routed: RoutedRequest, result: Outcome) -> None:
        shadow = routed.model.shadow
        assert shadow is not None
        shadow.add(result, self._inbound.body, answer, streamed=self._stream is not None)

    def _record(
        self,
        notes: RequestNotes,
        routed: RoutedRequest,
        status: int,
        outcome: str,
        result: Outcome | None,
        usage: Usage | None,
    ) -> None:
        """Pass the finished request to the recorder."""
        inbound, upstream, recorder = self._inbound, self._upstream, self._relay.recorder
        assert recorder is not None
        recorder.add(
            FinishedRequest(
                notes,
                self._request_id,
                self._request_headers.client.name,
                routed,
                recorder.body_to_keep(routed, inbound.body),
                self._decision,
                upstream.backend if upstream is not None else None,
                self._tried[0] if self._tried else "",
                status,
                outcome,
                result,
                usage,
                inbound.arrived_s,
                time.perf_counter(),
            )
        )
