"""HTTP/1.1 to a backend, for the relay: a small client over `asyncio.Protocol` and httptools.

The relay is told of an answer by callbacks (`Receiver`), as its bytes come, with nothing copied or queued in
between. Connections are kept alive and reused, newest first. A reused connection that the backend closed before
a byte of the answer came is the keep-alive race: the request is sent once more on a fresh connection.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from backends.http.head_pattern import HeadPattern, pattern_of
from backends.http.write_batch import WriteBatch

HeaderList = list[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """The backend could not be reached, broke off, or did not speak HTTP.

    Parameters
    ----------
    kind
        `connect`, `broken` (ended before the answer did), `garbage` (not HTTP/1.1) or `exhausted` (this process had no
        file or port left for a connection, which is no fault of the backend's); a Prometheus label.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Receiver(Protocol):
    """Who is told of an answer: `on_head` once, `on_data` as bytes come, then one of `on_end` and `on_error`.

    After `Call.cancel` none of them is called any more.
    """

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Take the final status and headers; interim (1xx) answers are not told."""

    def on_data(self, data: bytes) -> None:
        """Take bytes of the body."""

    def on_end(self) -> None:
        """Know that the answer is complete."""

    def on_error(self, error: UpstreamError) -> None:
        """Know that no more will come, and why."""


class AnswerHead:
    """The status and headers of an answer that came whole; the same object for all that are alike.

    Attributes
    ----------
    headers
        With the `content-length` of the answer that it was first seen on: another's is the length of its body.
    """

    __slots__ = ("headers", "status")

    def __init__(self, status: int, headers: HeaderList) -> None:
        self.status = status
        self.headers = headers


class WholeReceiver(Receiver, Protocol):
    """Who would rather take an answer in one piece, where it comes in one."""

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Take an answer with status 200 and a length, all of it: in place of `on_head`, `on_data` and `on_end`."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a backend listens.

    Parameters
    ----------
    host, port
        For TCP; the host without brackets if IPv6.
    path
        Of a Unix socket; host and port mean nothing then.
    authority
        The value of the `Host` header.
    """

    host: str
    port: int
    authority: bytes
    tls: bool = False
    path: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read `http://host[:port]`, `https://host[:port]` or `unix:/path/to.sock`.

        Raises
        ------
        ValueError
            If it is none of these.
        """
        if url.startswith("unix:"):
            path = url.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/"):
                raise ValueError(f"{url!r}: a Unix socket needs an absolute path, unix:/path/to.sock")
            return cls("localhost", 0, b"localhost", path=path)
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r}: expected http://host:port, https://host:port or unix:/path/to.sock")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.hostname, port, parts.netloc.rpartition("@")[2].encode("ascii"), parts.scheme == "https")


_NO_BODY_STATUSES = frozenset({204, 304})
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Connection:
    """One connection to a backend, an `asyncio.Protocol`; carries one call at a time.

    It has the methods of one, which is all that an event loop asks for. It does not inherit from it, so that it can be
    compiled.
    """

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._call: Call | None = None
        self._headers: HeaderList = []
        self._status = 0
        self._until_close = False
        self._told_head = False
        self._first: bytes | None = None  # what the answer began with, while that is being parsed
        self._fresh = True  # nothing of the answer has been parsed
        self.closed = False

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came, which tells the call's receiver."""
        call = self._call
        if call is None:  # an idle connection has nothing to say
            self.close()
            return
        call.answered = True
        if self._fresh and call.whole is not None:
            known = self._client.known
            if known is not None and (begins := known.body_begins(data)) >= 0 and len(data) - begins == known.length:
                self._client.unknown = 0
                self._free(call)
                call.whole.on_whole(self._client.known_head, data[begins:])
                return
            self._first = data
        self._fresh = False
        try:
            self._parser.feed_data(data)
            self._first = None
        except httptools.HttpParserUpgrade:
            self._fail("garbage", "switched protocols, which was not asked for")
        except httptools.HttpParserCallbackError:
            raise  # a receiver of ours failed: not the backend's fault
        except httptools.HttpParserError as error:
            self._fail("garbage", f"did not answer in HTTP/1.1 ({error})")

    def eof_received(self) -> bool:
        """Let the transport close itself; `connection_lost` follows."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End the call that was under way: well, if its answer lasts until the connection closes."""
        self.closed = True
        self._client.forget(self)
        if self._call is None:
            pass
        elif self._until_close and exc is None and self._told_head:
            self._complete()
        else:
            self._fail("broken", f"closed the connection before its answer was complete{f' ({exc})' if exc else ''}")
        self._parser = self._transport = None  # which refer to this: nobody should have to look for the three

    def pause_writing(self) -> None:
        """Do nothing: a request is written whole, and its size was bounded when it was read."""

    def resume_writing(self) -> None:
        """Do nothing, as above."""

    # What httptools tells.

    def on_message_begin(self) -> None:
        """Begin an answer, interim or final."""
        self._headers = []
        self._told_head = False
        self._until_close = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header."""
        name = name.lower()
        if name in _FRAMING:
            self._until_close = False
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Tell the receiver of a final answer's head."""
        status = self._parser.get_status_code()
        self._status = status
        if status < 200 or self._call is None:
            return
        if status in _NO_BODY_STATUSES:
            self._until_close = False
        self._told_head = True
        self._call.receiver.on_head(status, self._headers)
        if self._call is not None and self._call.head_only:
            self._complete(reusable=False)  # the parser would wait for a body that a HEAD never has

    def on_body(self, data: bytes) -> None:
        """Hand bytes of the body on."""
        if self._call is not None:
            self._call.receiver.on_data(data)

    def on_message_complete(self) -> None:
        """Free the connection and tell the receiver."""
        if self._status < 200 or self._call is None:
            return
        reusable = self._parser.should_keep_alive() and not self._until_close
        if reusable and self._first is not None and self._status == 200:
            self._client.learn(self._first, AnswerHead(200, self._headers))
        self._complete(reusable=reusable)

    # What the client and its calls do.

    def carry(self, call: Call) -> None:
        """Write a call's request; its receiver is told of the answer."""
        assert self._transport is not None
        self._call = call
        self._until_close = False
        self._told_head = False
        self._fresh = True
        if len(call.body) < 65_536:
            request = call.head + call.body  # one segment, one system call
            if (writes := self._client.writes) is not None:
                writes.add(self._transport, request)
            else:
                self._transport.write(request)
        else:
            self._transport.writelines((call.head, call.body))

    def pause_reading(self) -> None:
        """Read nothing more from the backend until `resume_reading`."""
        if self._transport is not None and not self.closed:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()

    def close(self) -> None:
        """Close at once; a call on it hears nothing more."""
        self._call = None
        self.closed = True
        self._client.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def is_usable(self) -> bool:
        """Say whether an idle connection may carry another call."""
        return not self.closed and self._transport is not None and not self._transport.is_closing()

    def _free(self, call: Call) -> None:
        """Let go of a call that was answered in one piece."""
        self._call = call.connection = None
        if call.paused and self._transport is not None:
            self._transport.resume_reading()
        self._client.keep(self)

    def _complete(self, *, reusable: bool = False) -> None:
        call, self._call = self._call, None
        assert call is not None
        call.connection = None
        if call.paused and self._transport is not None and not self.closed:
            self._transport.resume_reading()
        if reusable:
            self._client.keep(self)
        else:
            self.close()
        call.receiver.on_end()

    def _fail(self, kind: str, what: str) -> None:
        call, self._call = self._call, None
        if not self.closed:
            self.close()
        if call is None:
            return
        call.connection = None
        if kind == "broken" and call.reused and not call.answered:
            self._client.send_again(call)
        else:
            call.receiver.on_error(UpstreamError(kind, what))


class Call:
    """One request on its way to a backend and its answer back.

    Attributes
    ----------
    answered
        True once a byte of the answer has come.
    reused
        True while it is on a connection that carried another call before.
    connecting
        The task that opens a connection for it, while there is one.
    """

    __slots__ = (
        "answered",
        "body",
        "connecting",
        "connection",
        "head",
        "head_only",
        "paused",
        "receiver",
        "reused",
        "whole",
    )

    def __init__(
        self, head: bytes, body: bytes, receiver: Receiver, *, head_only: bool, whole: WholeReceiver | None
    ) -> None:
        self.head = head
        self.body = body
        self.receiver = receiver
        self.head_only = head_only
        self.whole = whole
        self.connection: Connection | None = None
        self.reused = False
        self.answered = False
        self.paused = False
        self.connecting: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Give the call up: the connection closes, at which vLLM aborts the request; the receiver hears no more."""
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.close()

    def pause(self) -> None:
        """Stop reading the answer (the reader of it is slow)."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self.paused = False
        if self.connection is not None:
            self.connection.resume_reading()


class UpstreamClient:
    """The connections to one backend.

    Parameters
    ----------
    address
        Where the backend listens.
    connect_timeout_s
        Seconds that a connection may take to come about, name look-up and TLS included.
    max_idle
        Idle connections kept at most.
    writes
        Whose turn's end requests wait for; None to write them at once.
    """

    def __init__(
        self,
        address: Address,
        *,
        connect_timeout_s: float = 2.0,
        max_idle: int = 512,
        tls: ssl.SSLContext | None = None,
        writes: WriteBatch | None = None,
    ) -> None:
        self.address = address
        self.writes = writes
        self._connect_timeout_s = connect_timeout_s
        self._max_idle = max_idle
        self._tls = tls or (ssl.create_default_context() if address.tls else None)
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._closing = False
        self.known: HeadPattern | None = None
        self.known_head = AnswerHead(0, [])
        self.unknown = 0  # heads in a row that were not known

    def send(
        self,
        head: bytes,
        body: bytes,
        receiver: Receiver,
        *,
        head_only: bool = False,
        whole: WholeReceiver | None = None,
    ) -> Call:
        """Send a request and tell `receiver` of its answer.

        Parameters
        ----------
        head
            Request line and headers with the blank line that ends them.
        head_only
            True for a HEAD request, whose answer has no body whatever its headers say.
        whole
            `receiver` again, if it takes answers in one piece.
        """
        call = Call(head, body, receiver, head_only=head_only, whole=None if head_only else whole)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                call.reused = True
                self._put(call, connection)
                return call
        self._connect_for(call)
        return call

    def send_again(self, call: Call) -> None:
        """Send a call on a fresh connection, after the keep-alive race took its first one."""
        call.reused = False
        self._connect_for(call)

    def learn(self, data: bytes, head: AnswerHead) -> None:
        """Keep what an answer began with, to know the head of the next one again.

        Where all heads differ, as with an id of the request in them, one in 64 is kept, in case that changes.
        """
        self.unknown += 1
        if self.unknown > 64 and self.unknown % 64:
            return
        if (pattern := pattern_of(data)) is not None:
            self.known, self.known_head = pattern, head

    def keep(self, connection: Connection) -> None:
        """Take back a connection that is free again."""
        if self._closing or len(self._idle) >= self._max_idle:
            connection.close()
        else:
            self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that has closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections now, and those in use as they become free."""
        self._closing = True
        for connection in list(self._idle):
            connection.close()

    def close_idle(self) -> None:
        """Close what is idle, as when the backend was seen to die."""
        for connection in list(self._idle):
            connection.close()

    def _connect_for(self, call: Call) -> None:
        call.connecting = asyncio.get_running_loop().create_task(self._connect(call))

    async def _connect(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        address = self.address
        connection = Connection(self)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if address.path is not None:
                    await loop.create_unix_connection(lambda: cast("asyncio.Protocol", connection), address.path)
                else:
                    await loop.create_connection(
                        lambda: cast("asyncio.Protocol", connection),
                        address.host,
                        address.port,
                        ssl=self._tls,
                        server_hostname=address.host if self._tls else None,
                    )
        except TimeoutError:
            error = UpstreamError("connect", f"did not take a connection within {self._connect_timeout_s:g} s")
        except (OSError, ssl.SSLError) as cause:
            if cause.errno in _EXHAUSTED:
                error = UpstreamError("exhausted", f"could not be connected to: the gateway is full ({cause})")
            else:
                error = UpstreamError("connect", f"refused the connection ({cause})")
        else:
            call.connecting = None
            self._open.add(connection)
            self._put(call, connection)
            return
        call.connecting = None
        call.receiver.on_error(error)

    def _put(self, call: Call, connection: Connection) -> None:
        call.connection = connection
        connection.carry(call)
        if call.paused:
            connection.pause_reading()


def request_head(method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Write a request line and headers as HTTP/1.1 has them, with the blank line."""
    parts = [method, b" ", target, b" HTTP/1.1\r\n"]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)
