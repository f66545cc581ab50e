"""The relay's HTTP/1.1 client: asyncio protocols and httptools.

It passes an answer to callbacks (`Receiver`) as its bytes arrive; nothing is copied or queued. It keeps connections
alive and reuses them, newest first, until they have been idle so long that a load balancer may have dropped them
silently. If the backend closes a reused connection before the first byte of an answer (the keep-alive race), the
request is sent again on a new connection. A request that must not be sent twice never uses an old connection.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, cast

import httptools

from backends import background
from backends.http.address import Address, connect
from backends.http.authorities import trusted
from backends.http.receiver import HeaderList, KnownHead, Receiver, UpstreamError, WholeReceiver
from backends.http.wire import WriteBatch

_now_s: Final = time.monotonic
_NO_BODY_STATUSES: Final = frozenset({204, 304})
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_MOST_BARE_BYTES: Final = 1 << 17
"""Consecutive bytes allowed without any of a body: heads, interim answers, chunk extensions, trailers."""
_MOST_JOINED_BYTES: Final = 1 << 16  # larger bodies are not copied, and may be answered before they are sent
_MOST_IN_A_TURN_BYTES: Final = 1 << 16
"""Bytes of an answer parsed before other connections get their turn; a single read may return more."""


class UpstreamConnection:
    """One connection to a backend; carries one call at a time.

    It implements `asyncio.Protocol` without inheriting from it, so that mypyc can compile it.
    """

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._call: Call | None = None
        self._headers: HeaderList = []
        self._status = 0
        self._until_close = False
        self._head_passed = False  # whether the receiver has the head
        self._first: bytes | None = None  # first bytes of an answer while they are parsed
        self._fresh = True  # whether nothing of the answer has been parsed
        self._bare_bytes = 0  # received since the last byte of a body
        self._rest = b""  # received, but left for the next turn; reading is paused meanwhile
        self._is_free = False  # whether another call may follow if this read ended with the answer
        self.closed = False
        self.idle_since_s = 0.0  # by `time.monotonic`

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the answer, and so call the receiver."""
        call = self._call
        if call is None:  # data on an idle connection belongs to no request
            self.close()
            return
        if self._rest:  # TLS had already read this before the pause
            self._rest += data
            return
        call.answered = True
        if self._fresh and call.whole is not None:
            known = self._client.known
            if (body := known.body_in(data)) is not None:
                self._call = call.connection = None
                if call.paused and self._transport is not None:
                    self._transport.resume_reading()
                self._client.keep(self)
                call.whole.on_whole(known.head, body)
                return
            self._first = data
        self._fresh = False
        if len(data) > _MOST_IN_A_TURN_BYTES:
            self.pause_reading(is_paused=True)
            data, self._rest = data[:_MOST_IN_A_TURN_BYTES], data[_MOST_IN_A_TURN_BYTES:]
            asyncio.get_running_loop().call_soon(self._parse_rest)
        self._parse(data)

    def _parse_rest(self) -> None:
        """Parse the bytes left for this turn, and resume reading after the last of them."""
        if not self._rest or (self._call is not None and self._call.paused):
            return
        data, self._rest = self._rest[:_MOST_IN_A_TURN_BYTES], self._rest[_MOST_IN_A_TURN_BYTES:]
        try:
            self._parse(data)
        except Exception:  # the event loop closes the connection only if `data_received` raises
            self._fail("broken", "gave an answer that could not be handled")
            raise
        if self._call is None or not self._call.paused:
            self.pause_reading(is_paused=False)

    def _parse(self, data: bytes) -> None:
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
            self._first = None
            if self._bare_bytes > _MOST_BARE_BYTES and not self.closed:
                self._fail("garbage", f"sent {self._bare_bytes} bytes of headers")
                return
            if self._is_free:
                self._is_free = False
                if self._rest:  # an answer to no request
                    self.close()
                else:
                    self._client.keep(self)
        except httptools.HttpParserUpgrade:
            self._fail("garbage", "switched protocols without being asked to")
        except httptools.HttpParserCallbackError:
            raise  # the error is in a receiver, not in the backend
        except httptools.HttpParserError as error:
            self._fail("garbage", f"sent an invalid HTTP/1.1 answer ({error})")

    def eof_received(self) -> bool:
        """Return False: the transport then closes itself and calls `connection_lost`."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End the current call, successfully if the end of the connection ends its answer."""
        rest, self._rest = self._rest, b""
        if rest:
            self._parse(rest)
        self.closed = True
        self._client.forget(self)
        if self._call is not None and self._until_close and exc is None and self._head_passed:
            self._complete()
        else:
            self._fail("broken", f"closed the connection before the answer was complete{f' ({exc})' if exc else ''}")
        self._parser = self._transport = None  # breaks a reference cycle, so that the garbage collector is not needed

    def pause_writing(self) -> None:
        """Do nothing: a request is written in one piece, and its size was limited when it was read."""

    def resume_writing(self) -> None:
        """Do nothing, as in `pause_writing`."""

    # Called by httptools.

    def on_message_begin(self) -> None:
        """Reset the state for an answer, interim or final."""
        if self._is_free:  # an answer to no request
            self._is_free = False
            self.close()
        self._headers = []
        self._head_passed = False
        self._until_close = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store one header; drop trailers."""
        if self._head_passed:
            return
        name = name.lower()
        if name in _FRAMING:
            self._until_close = False
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Pass the head of a final answer to the receiver."""
        status = self._parser.get_status_code()
        call = self._call
        self._status = status
        if call is None:
            return
        if status < 100 or (status < 200 and not self._until_close):
            self._fail("garbage", f"sent an invalid HTTP/1.1 answer (status {status}, or a body that goes with none)")
            return
        if status < 200:
            return
        if status in _NO_BODY_STATUSES:
            self._until_close = False
        self._head_passed = True
        call.receiver.on_head(status, self._headers)
        if call.head_only and call.connection is not None:  # not cancelled by its receiver
            self._complete(reusable=False)  # the parser would wait for a body, which never follows HEAD

    def on_body(self, data: bytes) -> None:
        """Pass bytes of the body to the receiver."""
        self._bare_bytes = 0
        if self._call is not None:
            self._call.receiver.on_data(data)

    def on_message_complete(self) -> None:
        """Release the connection and end the call."""
        if self._status < 200 or self._call is None:
            return
        is_sent = self._transport is not None and not self._transport.get_write_buffer_size()  # else it may stay unread
        reusable = is_sent and self._parser.should_keep_alive() and not self._until_close and not self._call.once
        if reusable and self._first is not None and self._status == 200:
            self._client.known.learn(self._first, self._headers)
        self._complete(reusable=reusable)

    # Called by the client and its calls.

    def carry(self, call: Call) -> None:
        """Send a call's request, and pass the answer to its receiver."""
        assert self._transport is not None
        self._call, call.connection = call, self
        self._until_close = False
        self._head_passed = False
        self._fresh = True
        self._bare_bytes = 0
        if len(call.body) < _MOST_JOINED_BYTES:
            request = call.head + call.body  # one segment, one system call
            if (writes := self._client.writes) is not None:
                writes.add(self._transport, request)
            else:
                self._transport.write(request)
        else:
            self._transport.writelines((call.head, call.body))
        if call.paused:
            self.pause_reading(is_paused=True)

    def pause_reading(self, *, is_paused: bool) -> None:
        """Pause or resume reading from the backend."""
        if self._transport is not None and not self.closed:
            if is_paused:
                self._transport.pause_reading()
            elif self._rest:
                asyncio.get_running_loop().call_soon(self._parse_rest)
            else:
                self._transport.resume_reading()

    def close(self) -> None:
        """Close immediately, without calling the receiver of the current call."""
        self._call, self._rest = None, b""
        self.closed = True
        self._client.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def is_usable(self) -> bool:
        """Return whether this idle connection can carry another call."""
        return self._transport is not None and not self._transport.is_closing()

    def _complete(self, *, reusable: bool = False) -> None:
        call, self._call = self._call, None
        assert call is not None
        call.connection = None
        if call.paused and self._transport is not None and not self.closed:
            self._transport.resume_reading()
        if reusable:
            self._is_free = True
        else:
            self.close()
        call.receiver.on_end()

    def _fail(self, kind: str, message: str) -> None:
        call, self._call = self._call, None
        if not self.closed:
            self.close()
        if call is None:
            return
        call.connection = None
        if kind == "broken" and call.reused and not call.answered:
            self._client.send_on_new_connection(call)
        else:
            call.receiver.on_error(UpstreamError(kind, message))


class Call:
    """One request to a backend, and its answer."""

    def __init__(
        self,
        head: bytes,
        body: bytes,
        receiver: Receiver,
        *,
        head_only: bool = False,
        whole: WholeReceiver | None = None,
        once: bool = False,
    ) -> None:
        self.head = head
        self.body = body
        self.receiver = receiver
        self.head_only = head_only
        self.once = once  # whether its connection must carry no other call
        self.whole = None if head_only or once or len(body) >= _MOST_JOINED_BYTES else whole
        self.connection: UpstreamConnection | None = None
        self.reused = False  # whether its connection carried another call before
        self.answered = False  # true from the first byte of the answer
        self.paused = False
        self.connecting: asyncio.Task[None] | None = None  # the task that opens its connection; None once that is done

    def cancel(self) -> None:
        """Close the connection, so that vLLM aborts the request; the receiver is no longer called."""
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.close()

    def pause(self) -> None:
        """Stop reading the answer, for example for a slow client."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause_reading(is_paused=True)

    def resume(self) -> None:
        """Resume reading the answer."""
        self.paused = False
        if self.connection is not None:
            self.connection.pause_reading(is_paused=False)


class UpstreamClient:
    """Client of one backend, with its pool of connections."""

    def __init__(
        self,
        address: Address,
        *,
        connect_timeout_s: float = 2.0,
        max_idle: int = 512,
        keep_alive_s: float = 30.0,
        writes: WriteBatch | None = None,
    ) -> None:
        self.address = address  # address of the backend
        self.writes = writes  # batch in which small requests are written; None writes them immediately
        self._connect_timeout_s = connect_timeout_s  # including name resolution and the TLS handshake
        self._max_idle = max_idle  # maximum number of idle connections
        self._keep_alive_s = keep_alive_s  # seconds after which an idle connection is closed
        self._tls = trusted() if address.tls else None
        self._idle: list[UpstreamConnection] = []  # longest idle first
        self._expiry: asyncio.TimerHandle | None = None
        self._closing = False
        self.known = KnownHead()  # of earlier answers

    def send(self, call: Call) -> Call:
        """Send a request; the answer goes to its receiver."""
        self._close_expired()
        while self._idle and not call.once:
            connection = self._idle.pop()
            if connection.is_usable():
                call.reused = True
                connection.carry(call)
                return call
        self.send_on_new_connection(call)
        return call

    def send_on_new_connection(self, call: Call) -> None:
        """Send a call on a new connection, for example after losing the keep-alive race."""
        call.reused = False
        call.connecting = background.start("connections", self._connect(call))

    def keep(self, connection: UpstreamConnection) -> None:
        """Return a connection to the pool."""
        if self._closing or len(self._idle) >= self._max_idle:
            connection.close()
            return
        connection.idle_since_s = _now_s()
        self._idle.append(connection)
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(self._keep_alive_s, self._expire)

    def forget(self, connection: UpstreamConnection) -> None:
        """Remove a closed connection from the pool."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close idle connections now, and the others when their calls end."""
        self._closing = True
        for connection in list(self._idle):
            connection.close()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire(self) -> None:
        """Close connections that have been idle for too long, and schedule the next run."""
        self._expiry = None
        self._close_expired()
        if self._idle:
            left_s = self._idle[0].idle_since_s + self._keep_alive_s - _now_s()
            self._expiry = asyncio.get_running_loop().call_later(left_s, self._expire)

    def _close_expired(self) -> None:
        oldest_s = _now_s() - self._keep_alive_s
        while self._idle and self._idle[0].idle_since_s <= oldest_s:
            self._idle[0].close()

    async def _connect(self, call: Call) -> None:
        connection = UpstreamConnection(self)
        error = await connect(self.address, cast("asyncio.Protocol", connection), self._connect_timeout_s, self._tls)
        call.connecting = None
        if error is None:
            connection.carry(call)
        else:
            call.receiver.on_error(error)
