"""The frontend on `gateway.http.server`: passes requests to the relay, or for own paths to the ASGI application."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from backends import background
from gateway.dialects.errors import GatewayError
from gateway.http.headers import lines_of
from gateway.http.reply import HttpReply
from gateway.relay.admission import begin
from gateway.relay.context import RelayContext
from gateway.routing.access import Access, RequestHeaders

log = logging.getLogger(__name__)

_CODES = {
    408: "request_timeout",
    413: "body_too_large",
    414: "target_too_long",
    431: "headers_too_large",
    501: "not_implemented",
    503: "overloaded",
    505: "http_version_not_supported",
}
_RETRY_AFTER_S = 2.0


class Current(Protocol):
    """The current parts of a gateway process: a reload replaces them."""

    relay: RelayContext
    admin_access: Access | None  # access rules of the admin address; None if clients share it


def access_of(current: Current, *, is_admin: bool) -> Access:
    """Return the access rules of the admin address, or of the clients'."""
    return current.admin_access if is_admin and current.admin_access is not None else current.relay.access


class HttpFrontend:
    """The service behind the gateway's HTTP server."""

    def __init__(
        self,
        current: Current,
        app: ASGIApp,
        tasks: set[asyncio.Task[None]],
        *,
        is_admin: bool = False,
        scheme: str = "http",
    ) -> None:
        self._current = current
        self._is_admin = is_admin  # whether it serves the admin address, not the clients'
        self._scheme = scheme
        self._app = app  # ASGI application for the gateway's own paths
        self._tasks = tasks  # holds references to the running tasks of `app`

    def admit(self, reply: HttpReply) -> None:
        """Check the API key and the path of a request."""
        request = reply.request
        try:
            access = access_of(self._current, is_admin=self._is_admin)
            request.keep(access.admit(request.method, request.target, request.headers))
        except GatewayError as error:
            self._answer(reply, error)

    def handle(self, reply: HttpReply, body: bytes) -> None:
        """Relay a request, or let the application answer it."""
        request = reply.request
        headers: RequestHeaders | None = request.notes
        if headers is None:
            call = _AppCall(reply, body, self._scheme)
            task = background.start("own paths", call.run(self._app))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        begin(self._current.relay, headers, body, reply)

    def refuse(self, reply: HttpReply, status: int, reason: str) -> None:
        """Answer a request that the server does not accept."""
        retry_after_s = _RETRY_AFTER_S if status == 503 else None
        code = _CODES.get(status, "invalid_request")
        self._answer(reply, GatewayError(status, reason, code=code, retry_after_s=retry_after_s))

    def _answer(self, reply: HttpReply, error: GatewayError) -> None:
        request, access = reply.request, access_of(self._current, is_admin=self._is_admin)
        self._current.relay.refuse(reply, access, error, request.method, request.target, request.headers)


class _AppCall:
    """A call of an ASGI application; it is the source of the answer."""

    def __init__(self, reply: HttpReply, body: bytes, scheme: str) -> None:
        self._scheme = scheme
        self._reply = reply
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._may_send = asyncio.Event()
        self._may_send.set()
        reply.answered_by(self)

    async def run(self, app: ASGIApp) -> None:
        """Pass the request to the application."""
        request, body = self._reply.request, self._body or b""
        path, _, query = request.target.partition(b"?")
        framing = (b"content-length", b"transfer-encoding")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},  # from 2.4 on, sending to a client that has gone raises
            "http_version": "1.1" if request.is_http_1_1 else "1.0",
            "method": request.method,
            "scheme": self._scheme,
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
            log.exception("the gateway failed to answer %s", path.decode("latin-1"))
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
        await self._may_send.wait()
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
        """Signal to the application that its client has disconnected."""
        self._gone.set()
        self._may_send.set()

    def pause(self) -> None:
        """Pause the application before its next message."""
        self._may_send.clear()

    def resume(self) -> None:
        """Resume the application."""
        self._may_send.set()
