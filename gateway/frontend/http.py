"""The frontend on `backends.http.server`: requests go to the relay without ASGI, the gateway's own paths to its app."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from backends.http.server import HttpReply
from gateway.frontend.asgi import Message, Receive, Scope, Send
from gateway.http.errors import GatewayError, format_of
from gateway.http.headers import lines_of
from gateway.http.paths import is_own
from gateway.relay.context import Inbound, RelayContext
from gateway.relay.exchange import Exchange
from gateway.routing.request_headers import RequestHeaders

App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

_CODES = {413: "body_too_large", 414: "target_too_long", 431: "headers_too_large"}


class HttpFrontend:
    """What the gateway's HTTP server serves.

    Parameters
    ----------
    app
        ASGI application for the gateway's own paths.
    tasks
        Set to keep the running tasks of `app` in.
    """

    def __init__(self, relay: RelayContext, app: App, tasks: set[asyncio.Task[None]]) -> None:
        self._relay = relay
        self._app = app
        self._tasks = tasks

    def admit(self, reply: HttpReply) -> None:
        """Check the API key of a request to be relayed."""
        request = reply.request
        if is_own(request.path):
            return
        try:
            request.notes = self._relay.request_headers(request.method, request.headers)
        except GatewayError as error:
            self._answer(reply, error)

    def handle(self, reply: HttpReply, body: bytes) -> None:
        """Relay a request, or have the application answer it."""
        request = reply.request
        headers: RequestHeaders | None = request.notes
        if headers is None:
            call = _AppCall(reply, body)
            task = asyncio.get_running_loop().create_task(call.run(self._app))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        exchange = Exchange(self._relay, Inbound(headers, request.path, request.target, body), reply)
        reply.source = exchange  # before `begin`, which may already answer
        exchange.begin()

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        """Answer a request that the server does not accept."""
        self._answer(reply, GatewayError(status, reason, code=_CODES.get(status, "invalid_request")))

    def _answer(self, reply: HttpReply, error: GatewayError) -> None:
        self._relay.metrics.count_refusal()
        request_id = dict(reply.request.headers).get(b"x-request-id") or self._relay.new_request_id()
        headers, body = error.answer(format_of(reply.request.path), request_id)
        reply.head(error.status, lines_of(headers))
        reply.data(body)
        reply.end()


class _AppCall:
    """A call of an ASGI application; it is the source of the answer."""

    def __init__(self, reply: HttpReply, body: bytes) -> None:
        self._reply = reply
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        reply.source = self

    async def run(self, app: App) -> None:
        """Have the application answer the request."""
        request, body = self._reply.request, self._body or b""
        path, _, query = request.target.partition(b"?")
        framing = (b"content-length", b"transfer-encoding")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1" if request.is_http_1_1 else "1.0",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [header for header in request.headers if header[0] not in framing]
            + ([(b"content-length", b"%d" % len(body))] if body else []),
            "client": None,
            "server": None,
            "state": {},
        }
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            log.exception("the gateway failed to answer %s", request.path)
        finally:
            if not self._reply.has_ended:
                self._reply.abort()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._reply.has_ended:
            return
        if message["type"] == "http.response.start":
            self._reply.head(message["status"], lines_of(message["headers"]))
            return
        self._reply.data(message.get("body", b""))
        if not message.get("more_body", False):
            self._reply.end()
            self._gone.set()

    def client_gone(self) -> None:
        """Have the application see the disconnection."""
        self._gone.set()

    def pause(self) -> None:
        """Do nothing: the answers are small."""

    def resume(self) -> None:
        """Do nothing, as in `pause`."""
