"""A client connection: it answers requests one after another; what arrives meanwhile waits unread."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, Final

from gateway.http.reader import BEGINNING, HEAD, NOTHING, WHOLE, RequestReader
from gateway.http.reply import Connection, HttpReply
from gateway.http.request_head import RequestError, RequestHead
from gateway.http.server import HttpServer

_now_s: Final = time.monotonic
_MAX_WAITING_BYTES: Final = 2**16
"""Most bytes that wait behind the current request before reading pauses, which hides a client's disconnect."""
_MAX_IN_A_ROW: Final = 16
"""Requests that a connection handles before others get their turn."""
_LINGER_S = 2.0
_BEGIN_S = 5.0
"""Seconds that a connection has to begin, or to complete a head, while the server is stopping."""


class ServerConnection(Connection):
    """The reading half of a client connection.

    It implements `asyncio.Protocol` without inheriting from it, so that mypyc can compile it.
    """

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.writes, server.date)
        self.server = server
        self.is_new = True  # no head has been complete
        self.is_closing = False  # what is received is dropped
        self.since_s = 0.0  # when it became idle or closing, or began the current head or body
        self._reader = RequestReader(server.limits.head, server.limits.body_bytes)
        self._is_reading = False  # `_read` is running
        self._read_s = 0.0  # when part of a body last arrived

    # Called by asyncio

    def connection_made(self, transport: Any) -> None:
        """Register the connection, or refuse it."""
        self._transport = transport
        self.since_s = _now_s()
        if self.server.register(self):
            return
        if self.server.is_overfull():
            self.abort()
        else:
            self._refuse(503, "The server has no room for another connection. Try again later.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the current answer, and break the reference cycles."""
        self.is_closing = True
        self.server.connections.discard(self)
        self._transport = None
        reply, self.reply = self.reply, None
        self._drop()
        if reply is not None:
            reply.client_gone()

    def resume_writing(self) -> None:
        """Resume the answer, or continue with waiting requests."""
        self._slow_since_s = 0.0
        if self.is_closing:
            self.since_s = _now_s()  # time to send the last of an answer
        elif self.reply is not None:
            if (source := self.reply.source) is not None:
                source.resume()
        else:
            self._read_later()

    def data_received(self, data: bytes) -> None:
        """Read requests, and handle each as soon as it is complete."""
        if not self.is_closing:
            self._reader.feed(data)
            self._read()

    # Called by replies

    def answered(self, reply: HttpReply) -> None:
        """Continue with the next request, or close."""
        if self._transport is None:
            return
        self.reply = None
        if not reply.keep_alive:
            self._close(lingers=not reply.is_complete)
            return
        self.since_s = _now_s()
        self._read_later()

    def _close(self, *, lingers: bool) -> None:
        """Close; with a delay if the client is still sending, since it might not read the answer otherwise."""
        self.is_closing = True
        self.since_s = _now_s()
        self._drop()
        self.pause_reading(is_paused=False)
        if not lingers:
            self.server.close(self._transport)

    # Called by the server

    def shutdown(self) -> None:
        """Close the connection once the current request, or one that may be on its way, has been answered."""
        if self.reply is not None:
            self.reply.keep_alive = False
        elif self._transport is not None and not self.is_closing:
            may_begin = (self.is_new or self._reader.waiting_bytes()) and _now_s() - self.since_s < _BEGIN_S
            if not may_begin:
                self._close(lingers=False)

    def abort(self) -> None:
        """Close the connection immediately."""
        self.is_closing = True
        self._drop()
        if self._transport is not None:
            self._transport.abort()

    def shed(self) -> None:
        """Refuse the unfinished request, or disconnect a client that sends ahead of its answers."""
        if self.reply is None or self._reader.is_reading_body:  # no complete request is being answered
            self._refuse(503, "The server holds too many unfinished requests. Send the request again.")
        else:
            self.reset()

    def follow_limits(self) -> None:
        """Bound the next request by the current limits, and ask the service about it even if its head is known."""
        self._reader.forget(self.server.limits.body_bytes)

    def idle_since_s(self) -> float:
        """Return since when it has waited for a request, or the rest of its head; infinity if it does not wait."""
        is_idle = self.reply is None and not self._slow_since_s and self._transport is not None
        return self.since_s if is_idle else math.inf

    def check(self, now_s: float) -> None:
        """Close the connection if its client has taken too long."""
        server, transport, reader, taken_s = self.server, self._transport, self._reader, now_s - self.since_s
        limits = server.limits
        if transport is None:
            return
        if self._slow_since_s:
            if self.receives_nothing_s(now_s) > limits.stall_s:
                self.reset()
        elif self.is_closing:
            if taken_s > _LINGER_S + limits.stall_s:
                self.reset()
            elif taken_s > _LINGER_S:
                server.close(transport)
        elif reader.is_reading_body:
            if taken_s > limits.body_s or now_s - self._read_s > limits.stall_s:
                self._refuse(408, "The body of the request did not arrive in time.")
        elif self.reply is not None:
            return
        elif reader.waiting_bytes() and not server.is_stopping:
            if taken_s > limits.head_s:
                self._refuse(408, "The head of the request did not arrive in time.")
        elif taken_s > (_BEGIN_S if server.is_stopping else limits.head_s if self.is_new else limits.idle_s):
            self._close(lingers=False)

    # Events of the reader

    def _read(self) -> None:
        """Handle what was received; the rest waits while a request is being answered."""
        reader, count = self._reader, 0
        self._is_reading = True
        try:
            while (
                not self.is_closing
                and (reader.is_reading_body or not self._must_wait(count))
                and (event := reader.next()) != NOTHING
            ):
                if event == HEAD:
                    count += 1
                    self.is_new, self._read_s = False, 0.0
                    is_last, is_known = self.server.is_stopping, reader.is_known
                    self.reply = HttpReply(self, reader.head, is_last=is_last, is_admitted=is_known)
                elif event == BEGINNING:
                    self.since_s = _now_s()
                elif (reply := self.reply) is None:
                    continue
                elif event == WHOLE:
                    reply.is_complete = True
                    if reply.is_admitted or self._admit(reply):
                        self.server.service.handle(reply, reader.body)
                else:
                    self._expect_more(reply)
        except RequestError as error:
            self._refuse(error.status, error.reason)
        except Exception:
            self.abort()  # a defect, which the event loop logs
            raise
        self._is_reading = False
        if self.is_closing:
            return
        waiting_bytes = reader.waiting_bytes()
        must_wait = waiting_bytes > 0 and not reader.is_reading_body and self._must_wait(count)
        self.pause_reading(is_paused=must_wait and (self._is_paused or waiting_bytes > _MAX_WAITING_BYTES))
        if count == _MAX_IN_A_ROW and self.reply is None:
            self._read_later()
        if waiting_bytes or reader.is_reading_body or self.held_bytes:
            before, self.held_bytes = self.held_bytes, reader.held_bytes()
            self.server.hold(self.held_bytes - before)

    def _must_wait(self, count: int) -> bool:
        """Return whether the next request must wait: for an answer, a slow client, or other connections."""
        return count == _MAX_IN_A_ROW or self.reply is not None or self._slow_since_s != 0.0

    def _expect_more(self, reply: HttpReply) -> None:
        """Admit a request before the rest of its body; its client may wait for `100 Continue` to send that."""
        begins = self._read_s == 0.0
        self._read_s = _now_s()
        if begins:
            self.since_s = self._read_s
        if not reply.is_admitted and self._admit(reply) and reply.request.expects_continue:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _admit(self, reply: HttpReply) -> bool:
        self.server.service.admit(reply)
        reply.is_admitted = not reply.has_ended
        if reply.is_admitted:
            self._reader.learn()
        return reply.is_admitted

    def _refuse(self, status: int, reason: str) -> None:
        """Refuse what is being read, and close the connection."""
        reader, reply = self._reader, self.reply
        try:
            if reply is None or not reader.is_reading_body:
                head = reader.head if reader.is_reading_body else RequestHead("GET", b"/", [])
                reply = self.reply = HttpReply(self, head, is_last=True)
            self._drop()
            self.server.service.refuse(reply, status, reason)
        except Exception:
            self.abort()  # a defect, which the event loop logs
            raise

    def _drop(self) -> None:
        """Drop what has been read."""
        self._reader.drop()
        if self.held_bytes:
            self.server.hold(-self.held_bytes)
            self.held_bytes = 0

    def _read_later(self) -> None:
        """Read waiting requests in a later turn of the event loop."""
        if not self._is_reading and self._reader.waiting_bytes():
            asyncio.get_running_loop().call_soon(self._read)
