"""The plain ASGI frontend of the relay: works under any ASGI server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from backends import background
from gateway.http.errors import GatewayError, too_large
from gateway.http.headers import Header
from gateway.relay.context import Inbound, RelayContext, send_error
from gateway.relay.exchange import Exchange

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_HIGH_WATER_BYTES = 256 * 1024
_LOW_WATER_BYTES = 64 * 1024


class AsgiReply:
    """Queues an answer of the relay and sends it at the server's pace.

    Once more than 256 KiB are queued for a slow client, reading from the backend pauses until less than 64 KiB remain.
    """

    __slots__ = ("_messages", "_paused", "_waiter", "_waiting_bytes", "exchange")

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self._messages: deque[Message | None] = deque()  # None: aborted
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_bytes = 0
        self._paused = False

    def head(self, status: int, lines: bytes) -> None:
        """Queue status and headers."""
        self._put({"type": "http.response.start", "status": status, "headers": headers_of(lines)})

    def data(self, chunk: bytes) -> None:
        """Queue bytes of the body."""
        self._waiting_bytes += len(chunk)
        self._put({"type": "http.response.body", "body": chunk, "more_body": True})
        if self._waiting_bytes > _HIGH_WATER_BYTES and not self._paused and self.exchange is not None:
            self._paused = True
            self.exchange.pause()

    def end(self) -> None:
        """Queue the end of the answer."""
        self._put({"type": "http.response.body", "body": b"", "more_body": False})

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Queue a complete answer."""
        self.head(status, b"%bcontent-length: %d\r\n" % (lines, len(body)))
        self.data(body)
        self.end()

    def abort(self) -> None:
        """Stop before the end: the server closes the connection of an incomplete answer."""
        self._put(None)

    def _put(self, message: Message | None) -> None:
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def deliver(self, send: Send) -> None:
        """Send queued messages until the answer has ended."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                if message is None:
                    return
                if message["type"] == "http.response.body":
                    message = self._joined(message)
                await send(message)
                if message.get("more_body") is False:
                    return
                self._sent(len(message.get("body", b"")))
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _joined(self, message: Message) -> Message:
        """Merge the last bytes with the end of the answer, if both are queued: one message less."""
        if message["more_body"] and self._messages:
            following = self._messages[0]
            if following is not None and following.get("more_body") is False:
                self._messages.popleft()
                message["more_body"] = False
        return message

    def _sent(self, size: int) -> None:
        self._waiting_bytes -= size
        if self._paused and self._waiting_bytes < _LOW_WATER_BYTES and self.exchange is not None:
            self._paused = False
            self.exchange.resume()


class AsgiFrontend:
    """An ASGI application that relays every request.

    Parameters
    ----------
    max_body_bytes
        Limit of a request body; larger ones are refused with 413.
    """

    def __init__(self, relay: RelayContext, max_body_bytes: int) -> None:
        self._relay = relay
        self._max_body_bytes = max_body_bytes

    def use(self, relay: RelayContext, max_body_bytes: int) -> None:
        """Relay the requests that follow with other settings."""
        self._relay, self._max_body_bytes = relay, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        relay = self._relay
        headers: list[Header] = scope["headers"]
        path: str = scope["path"]
        try:
            request_headers = relay.access.relayed(scope["method"], target_of(scope), headers)
            body = await self._read(headers, receive)
        except GatewayError as error:
            request_id = dict(headers).get(b"x-request-id") or relay.new_request_id()
            relay.count_refused_head(request_id, scope["method"], path, headers, error)
            lines = relay.access.lines_of_refusal(target_of(scope), headers)
            await refuse(error, request_id, path, send, lines)
            return
        if body is None:
            return  # the client disconnected while sending
        reply = AsgiReply()
        exchange = Exchange(relay, Inbound(request_headers, body), reply)
        reply.exchange = exchange
        exchange.begin()
        watch = background.start("connections", _watch(receive, exchange, reply))
        try:
            await reply.deliver(send)
        except (asyncio.CancelledError, OSError):  # the server is shutting down, or the client has disconnected
            exchange.client_gone()
            raise
        finally:
            watch.cancel()
            reply.exchange = None  # breaks the reference cycle

    async def _read(self, headers: list[Header], receive: Receive) -> bytes | None:
        """Return the body; None if the client disconnected before its end."""
        limit = self._max_body_bytes
        declared = next((value for name, value in headers if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large(limit)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large(limit)
            if part:
                parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)


async def _watch(receive: Receive, exchange: Exchange, reply: AsgiReply) -> None:
    """Cancel the exchange when the client disconnects: otherwise the engine would keep generating."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.client_gone()
    reply.abort()


def target_of(scope: Scope) -> bytes:
    """Return the path and query of a request as received."""
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    return target + b"?" + scope["query_string"] if scope["query_string"] else target


def headers_of(lines: bytes) -> list[Header]:
    """Return header lines as ASGI has them."""
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines.split(b"\r\n")) if name]


async def refuse(error: GatewayError, request_id: bytes, path: str, send: Send, answer_lines: bytes) -> None:
    """Answer with an error a request that has not reached the relay."""
    reply = AsgiReply()
    send_error(reply, error, path, request_id, answer_lines)
    await reply.deliver(send)
