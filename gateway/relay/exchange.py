"""One exchange: a request, the backend it is sent to, and the answer on its way back.

Nothing of an answer is passed on before it is known to be one: of a stream, its first whole event; of any other
answer of an inference endpoint, all of it. Until then a request can go to another backend, once.
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
from gateway.relay.accounting import Ended, Timing, account, count_plain, is_plain
from gateway.relay.context import Inbound, RelayContext, Reply
from gateway.routing.model import Upstream
from gateway.routing.router import RoutedRequest
from gateway.shadow import Kept
from policies.features.request import Endpoint
from policies.policy import Decision, Outcome

log = logging.getLogger(__name__)

_WHOLE_ANSWER_BYTES = 1 << 20
_RETRYABLE = frozenset({500, 502, 503, 504})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})  # which have one even where it is empty
_ANSWERED = frozenset({"ok", "cancelled", "interrupted"})
_DOWN_PATIENCE_S = 5.0  # for a stream whose backend fails its health checks


class Exchange:
    """One request from its reading to its outcome; the receiver of its upstream call."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_call",
        "_decision",
        "_first_s",
        "_headers",
        "_heard_s",
        "_inbound",
        "_kept",
        "_last_s",
        "_passed_head",
        "_relay",
        "_reply",
        "_request_headers",
        "_request_id",
        "_retried",
        "_routed",
        "_status",
        "_stream",
        "_take",
        "_tried",
        "_upstream",
        "_whole",
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
        self._tried: list[str] = []
        self._retried: tuple[Backend, str] | None = None
        self._first_s = 0.0
        self._last_s = 0.0
        self._heard_s = inbound.arrived_s
        self._take = relay.recorder.take(self.endpoint) if relay.recorder is not None else None
        self._kept: Kept | None = None  # the answer, where lookups are to be replayed on it
        self._expect_answer()

    def _expect_answer(self) -> None:
        """Forget an answer that was not passed on."""
        self._status = 0
        self._headers: HeaderList = []
        self._passed_head = False
        self._stream: EventStream | None = None
        self._whole = False  # hold the answer until it is complete
        self._body: list[bytes] = []
        self._body_bytes = 0

    # From the door.

    def begin(self) -> None:
        """Route the request and send it on, or answer with what is wrong."""
        try:
            self._begin()
        except Exception:  # a defect; without this each door would make something else of it
            log.exception("a request could not be sent on")
            error = GatewayError(500, "The gateway has failed, and its log says how.", code="gateway_failed")
            if self in self._relay.exchanges:
                self.break_off(error)
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
                keep_bytes=self._take.keep_prompt_bytes if self._take is not None else 0,
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
            self._kept = shadow.begin(routed.features, inbound.body)
        relay.exchanges.add(self)
        try:
            candidates = self._candidates()
        except GatewayError as error:
            self._refuse(error)
            return
        self._send(candidates)

    def client_gone(self) -> None:
        """Give the request up: the client has left, and the engine need not go on."""
        if self in self._relay.exchanges:
            self._cancel_call()
            self._finish(499, "cancelled")

    def pause(self) -> None:
        """Read no more of the answer for now: the client is slow to take it."""
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        """Read on."""
        if self._call is not None:
            self._heard_s = time.perf_counter()  # what was silent meanwhile was the client
            self._call.resume()

    # To the backend.

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
        if self._take is not None:
            self._take.choose(candidates)
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
        self._heard_s = time.perf_counter()
        if self._tried:
            self._expect_answer()
        else:
            relay.metrics.overhead.labels(routed.model.name).observe(self._heard_s - inbound.arrived_s)
        relay.metrics.decisions.labels(routed.model.name, decision.policy, decision.reason).inc()
        self._call = upstream.client.send(head, body, self, head_only=method == "HEAD", whole=self)

    def _release(self) -> None:
        """Let go of the backend, whatever became of the call."""
        if self._upstream is not None and self._call is not None:
            self._upstream.backend.in_flight -= 1
        self._call = None

    def _cancel_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._release()

    def _elsewhere(self, kind: str) -> bool:
        """Send the request to another backend, if nothing of it was answered and it was not sent twice already."""
        upstream = self._upstream
        assert upstream is not None
        if self._passed_head or self._tried or self._request_headers.routing_headers.backend:
            return False
        if (
            self.endpoint is Endpoint.OTHER
            and self._request_headers.method not in {"GET", "HEAD"}
            and kind != "connect"
        ):
            return False  # it may have had its effect already
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
        """Go elsewhere if this exchange waits for its first byte from `backend`."""
        if self._call is None or self._upstream is None or self._upstream.backend is not backend or self._passed_head:
            return
        if not self._elsewhere("down"):
            self._fail("down", backend.state_reason)

    def check_silence(self, now_s: float) -> None:
        """Fail if the backend has been silent for longer than it may."""
        if self._call is None or self._call.paused:
            return
        assert self._upstream is not None
        timeouts = self._relay.timeouts
        limit_s = timeouts.idle_s if self._passed_head or self._body else timeouts.first_byte_s
        if self._upstream.backend.state is State.DOWN:
            limit_s = min(limit_s, _DOWN_PATIENCE_S)
        if now_s - self._heard_s > limit_s:
            self._fail_or_elsewhere("timeout", f"sent nothing for {limit_s:g} s")

    # From the backend.

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Pass an answer on that came in one piece."""
        upstream, call = self._upstream, self._call
        assert upstream is not None
        lines = upstream.lines_of_answer(head)
        if upstream.answers_json and self.endpoint is not Endpoint.OTHER:
            try:
                document = orjson.loads(body)
            except orjson.JSONDecodeError:
                pass  # goes the way of any other answer, to its end there
            else:
                usage = read_usage(document)
                self._status = head.status
                self._keep_whole(body, document)
                self._passed_head = True
                lines = b"%bx-request-id: %b\r\n%b" % (lines, self._request_id, self._own_lines())
                self._reply.whole(head.status, lines, body)
                self._succeed(usage)
                return
        headers = [one for one in head.headers if one[0] != b"content-length"]
        self.on_head(head.status, [*headers, (b"content-length", b"%d" % len(body))])
        if self._call is call and body:
            self.on_data(body)
        if self._call is call:
            self.on_end()

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Take the head of the answer, and decide how much of it must be seen before it is passed on."""
        self._heard_s = time.perf_counter()
        self._status = status
        self._headers = headers
        if self.endpoint is Endpoint.OTHER:
            return
        named = dict(headers)
        kind = named.get(b"content-type", b"")
        encoded = b"content-encoding" in named
        if status == 200 and kind.startswith(b"text/event-stream"):
            self._stream = None if encoded else EventStream(self.endpoint)
            return
        length = named.get(b"content-length", b"")
        self._whole = not encoded and (not length or (length.isdigit() and int(length) <= _WHOLE_ANSWER_BYTES))
        if status == 200 and not kind.startswith(b"application/json"):
            what = kind.decode("latin-1") or "no content type"
            self._fail_or_elsewhere("garbage", f"answered with {what}, not JSON or an event stream")

    def on_data(self, data: bytes) -> None:
        """Pass bytes of the answer on, as soon as it is known to be one."""
        now_s = time.perf_counter()
        previous_s, self._heard_s = self._heard_s, now_s
        stream = self._stream
        if stream is None:
            self._on_plain_data(data)
            return
        data = stream.feed(data)
        if not data:
            return
        if self._passed_head:
            assert self._upstream is not None
            self._upstream.metrics.itl.observe(now_s - previous_s)
            self._last_s = now_s
            if self._kept is not None:
                self._kept.keep(data)
            if (take := self._take) is not None:
                take.chunks.append(now_s)
                if take.answer is not None:
                    take.keep(data)
            self._reply.data(data)
            return
        if not is_event_stream(data):
            self._fail_or_elsewhere("garbage", "answered with something other than events")
            return
        if is_engine_error(data) and self._elsewhere("status"):
            return
        self._first_s = self._last_s = now_s
        if self._kept is not None:
            self._kept.keep(data)
        if self._take is not None:
            self._take.chunks.append(now_s)
            self._take.keep(data)
        self._note_home(data)
        self._pass_head()
        self._reply.data(data)

    def _on_plain_data(self, data: bytes) -> None:
        if self._whole:
            self._body.append(data)
            self._body_bytes += len(data)
            if self._body_bytes <= _WHOLE_ANSWER_BYTES:
                return
            self._whole = False  # too long to hold
            data = b"".join(self._body)
        if not self._passed_head:
            self._pass_head()
        self._reply.data(data)

    def on_end(self) -> None:
        """Pass the end on, and count what it was."""
        if self._status in _RETRYABLE and self._elsewhere("status"):
            return
        usage: Usage | None = None
        if self._whole:
            body, document = b"".join(self._body), None
            if self._status == 200:
                try:
                    document = orjson.loads(body)
                except orjson.JSONDecodeError:
                    self._fail_or_elsewhere("garbage", "answered with something that is not JSON")
                    return
                usage = read_usage(document)
            self._keep_whole(body, document)
            self._pass_head()
            if body:
                self._reply.data(body)
        elif self._stream is not None:
            rest = self._stream.rest()
            if not self._passed_head and not rest:
                self._fail_or_elsewhere("broken", "ended a stream with nothing in it")
                return
            if not self._passed_head:
                self._pass_head()
            if rest:
                self._reply.data(rest)
            usage = next(filter(None, map(read_usage, self._stream.last_documents())), None)
        elif not self._passed_head:
            self._pass_head()
        self._reply.end()
        self._succeed(usage)

    def _keep_whole(self, body: bytes, document: object) -> None:
        self._note_home(body)
        if self._kept is not None:
            self._kept.keep(body)
        if self._take is not None:
            self._take.read(self.endpoint, document, len(body))

    def _note_home(self, beginning: bytes) -> None:
        if self.endpoint is Endpoint.RESPONSES and self._upstream is not None:
            self._relay.router.locations.note_answer(beginning, self._upstream.backend.name)

    def on_error(self, error: UpstreamError) -> None:
        """Go elsewhere, or tell the client that the answer will not come or not end."""
        self._fail_or_elsewhere(error.kind, str(error))

    # What becomes of it.

    def _fail_or_elsewhere(self, kind: str, message: str) -> None:
        assert self._upstream is not None
        if kind == "exhausted":  # no other backend could be reached either, and none is to blame
            self._fail(kind, message)
            return
        backend = self._upstream.backend
        if not self._elsewhere(kind):
            self._fail(kind, message)
        self._relay.pool.report_failure(backend, kind, message)

    def _fail(self, kind: str, message: str) -> None:
        assert self._upstream is not None
        message = f"Backend {self._upstream.backend.name} {message}"
        if self._passed_head:
            message += ": this answer is not complete"
        status = {"timeout": 504, "connect": 503, "down": 503, "exhausted": 503}.get(kind, 502)
        retry_after_s = 2.0 if status == 503 else None
        error = GatewayError(
            status, f"{message}. Send the request again.", code=f"backend_{kind}", retry_after_s=retry_after_s
        )
        self.break_off(error)

    def break_off(self, error: GatewayError) -> None:
        """End badly: with an error if nothing was answered, in a stream with an error event, else by cutting it."""
        if not self._passed_head:
            self._refuse(error)
            return
        self._cancel_call()
        if self._stream is not None:
            self._reply.data(error.event(self.endpoint))
            self._reply.end()
        else:
            self._reply.cut()
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

    def _pass_head(self) -> None:
        self._passed_head = True
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
                # What another backend could serve was not the request's fault.
                pool.report_failure(self._retried[0], "status", "answered 5xx to what another backend could serve")
        outcome = "ok" if status < 400 else "client_error" if status < 500 else "engine_error"
        self._finish(status, outcome, usage)

    def _finish(self, status: int, outcome: str, usage: Usage | None = None) -> None:
        """Count the exchange and tell whom it concerns what came of it."""
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
            elif usage is not None and self._nobody_asks() and is_plain(usage, routed.model):
                tokens = count_plain(self._upstream, usage, time.perf_counter() - self._inbound.arrived_s)
            else:
                timing = Timing(self._inbound.arrived_s, self._first_s, self._last_s, time.perf_counter())
                ended = Ended(routed, self._decision, self._upstream, status, timing, usage, self._stream)
                result = account(ended, relay.metrics)
                tokens = result.prompt_tokens + result.output_tokens
                for listener in relay.listeners:
                    listener(result)
                if self._kept is not None and status == 200 and outcome == "ok":
                    self._replay_lookups(self._kept, routed, result)
        client = self._request_headers.client
        relay.limits.leave(client, tokens)
        if tokens:
            relay.metrics.keys.labels(client.name).inc(tokens)
        if self._take is not None:
            self._record(self._take, routed, status, outcome, result, usage)

    def _nobody_asks(self) -> bool:
        """Tell whether nobody but the metrics is to be told of this answer, which came in one piece."""
        return self._stream is None and self._take is None and self._kept is None and not self._relay.listeners

    def _replay_lookups(self, kept: Kept, routed: RoutedRequest, result: Outcome) -> None:
        shadow = routed.model.shadow
        assert shadow is not None
        shadow.add(result, self._inbound.body, kept, streamed=self._stream is not None)

    def _record(
        self,
        take: RequestNotes,
        routed: RoutedRequest,
        status: int,
        outcome: str,
        result: Outcome | None,
        usage: Usage | None,
    ) -> None:
        """Hand what is known of the exchange to the recorder."""
        inbound, upstream, recorder = self._inbound, self._upstream, self._relay.recorder
        assert recorder is not None
        recorder.add(
            FinishedRequest(
                take,
                self._request_id,
                self._request_headers.client.name,
                routed,
                recorder.body_wanted(routed, inbound.body),
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
