"""A client connection under uvicorn's protocol: requests with a known head bypass the parser.

Clients tend to send the same headers with each request. The head of a request is compared with an earlier one
(`backends.http.head_pattern`); if all bytes match, the earlier parse result is reused. A request whose head differs in
any byte, or that arrives while another one of its connection is in flight, goes through the parser.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from backends.http.head_pattern import HeadPattern, pattern_of
from gateway.frontend.request_cycle import RequestCycle
from gateway.http.headers import Header
from gateway.relay.context import RelayContext
from gateway.routing.request_head import RequestHead

if TYPE_CHECKING:
    from gateway.frontend.uvicorn import RelayProtocol


class Preamble:
    """uvicorn's default headers of every answer as bytes; rebuilt when their date changes, once a second."""

    __slots__ = ("_headers", "_state", "lines")

    def __init__(self, state: Any) -> None:
        self._state = state
        self._headers: list[Header] | None = None
        self.lines = b""

    def current(self) -> bytes:
        """Return the header lines."""
        headers = self._state.default_headers
        if headers is not self._headers:
            self._headers = headers
            self.lines = b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers])
        return self.lines


class ClientConnection:
    """The state of a client connection.

    Parameters
    ----------
    max_body_bytes
        Limit of a request body.

    Attributes
    ----------
    running
        The request that was last passed to the relay.
    last_head
        The head of the last parsed request.
    is_parsed
        Whether uvicorn's parser saw any data since the current request began: then uvicorn is notified when that
        request has been answered.
    idle_since_s
        When the last request was answered (`time.monotonic`); 0.0 while one is in flight or before the first.
    """

    __slots__ = (
        "_is_between",
        "_known_head",
        "_message_start",
        "_missing_bytes",
        "_parts",
        "_pattern",
        "_receiving",
        "_unknown_heads",
        "cycle",
        "idle_since_s",
        "is_parsed",
        "last_head",
        "max_body_bytes",
        "preamble",
        "protocol",
        "relay",
        "running",
        "transport",
    )

    def __init__(
        self, protocol: RelayProtocol, transport: Any, relay: RelayContext, preamble: Preamble, max_body_bytes: int
    ) -> None:
        self.protocol: Any = protocol
        self.transport = transport
        self.relay = relay
        self.preamble = preamble
        self.max_body_bytes = max_body_bytes
        self.cycle: RequestCycle | None = None
        self.running: RequestCycle | None = None
        self.last_head: RequestHead | None = None
        self.is_parsed = True
        self.idle_since_s = 0.0
        self._is_between = True  # the parser waits for the first byte of a message
        self._message_start: bytes | None = None  # the data that the current message began with
        self._pattern: HeadPattern | None = None
        self._known_head: RequestHead | None = None
        self._receiving: RequestCycle | None = None
        self._parts: list[bytes] = []
        self._missing_bytes = 0
        self._unknown_heads = 0  # in a row

    def receive_unparsed(self, data: bytes) -> bool:
        """Handle received data if it is a request with a known head, or more of its body.

        Returns
        -------
        bool
            False if the data must be parsed.
        """
        self.idle_since_s = 0.0
        if self._receiving is not None:
            self._receive_body(self._receiving, data)
            return True
        pattern, known, last = self._pattern, self._known_head, self.cycle
        if pattern is not None and known is not None and self._is_between and (last is None or last.response_complete):
            begins = pattern.body_begins(data)
            length = pattern.length
            if begins >= 0 and length <= self.max_body_bytes:
                cycle = RequestCycle(self, known)
                self.cycle = self.protocol.cycle = cycle
                self.is_parsed = False
                self._unknown_heads = 0
                more = len(data) - begins - length
                if more == 0:
                    cycle.begin(data[begins:])
                elif more < 0:
                    self._parts, self._missing_bytes, self._receiving = [data[begins:]], -more, cycle
                else:
                    cycle.begin(data[begins : begins + length])
                    self.protocol.data_received(data[begins + length :])
                return True
        self.is_parsed = True
        if self._is_between:
            self._message_start = data
        return False

    def _receive_body(self, cycle: RequestCycle, data: bytes) -> None:
        more = len(data) - self._missing_bytes
        self._missing_bytes = -more
        if more < 0:
            self._parts.append(data)
            return
        self._receiving = None
        parts, self._parts = self._parts, []
        parts.append(data if more == 0 else data[: len(data) - more])
        cycle.begin(b"".join(parts))
        if more:
            self.protocol.data_received(data[len(data) - more :])

    def message_begun(self) -> None:
        """Handle the beginning of a message in the parser."""
        self._is_between = False

    def message_complete(self) -> None:
        """Handle the end of a message in the parser."""
        self._is_between = True
        self._message_start = None  # a message that follows in the same data begins somewhere within it

    def learn_head(self, head: RequestHead) -> None:
        """Remember the head of a parsed request, from a connection's second request on: many have just one.

        If all heads differ (by a request id, for example), only one in 16 is remembered, in case that changes.
        """
        last, self.last_head = self.last_head, head
        if (
            last is None
            or self._message_start is None
            or head.expects_continue
            or not (head.keep_alive and head.content_length)
        ):
            return
        if any(name == b"upgrade" for name, _ in head.headers):
            return
        self._unknown_heads += 1
        if self._unknown_heads > 16 and self._unknown_heads % 16:
            return
        pattern = pattern_of(self._message_start)
        if pattern is not None and head.content_length == b"%d" % pattern.length:
            self._pattern, self._known_head = pattern, head

    def forget_head(self) -> None:
        """Have the next request parsed: the current one is served by ASGI, which may change the protocol."""
        self._pattern = self._known_head = None

    def answered(self) -> None:
        """Handle the end of the current answer."""
        if self.protocol is None:
            return
        if self.is_parsed:
            self.protocol.on_response_complete()
        else:
            self.idle_since_s = time.monotonic()

    def close(self) -> None:
        """Cancel the running request and break reference cycles, which would wait for the garbage collector."""
        running, self.running = self.running, None
        self.protocol = self.cycle = self._receiving = None
        if running is not None:  # uvicorn notifies only the last request, which may be queued behind this one
            running.disconnected = True
            running.set()
