"""One client's connection, beside uvicorn's protocol for it: requests whose head came before are taken unparsed.

Clients send the same headers each time. A request with such a head needs no parser: the head is compared with the one
before (`backends.http.head_pattern`), and what the parser once made of that holds. Whatever does not match in every
byte, or comes while another request of the connection is under way, goes through the parser.
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
    """The headers that uvicorn puts before every answer, written once a second, when their date changes."""

    __slots__ = ("_headers", "_state", "lines")

    def __init__(self, state: Any) -> None:
        self._state = state
        self._headers: list[Header] | None = None
        self.lines = b""

    def current(self) -> bytes:
        """Return them as lines."""
        headers = self._state.default_headers
        if headers is not self._headers:
            self._headers = headers
            self.lines = b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers])
        return self.lines


class ClientConnection:
    """What is known of a connection.

    Attributes
    ----------
    running
        The request that was last sent on.
    last
        The head of the last request that was parsed.
    is_parsed
        Whether anything since the beginning of the last request went through uvicorn's parser: then uvicorn is told
        when that request is answered.
    idle_since_s
        When its last request was answered, on the clock of `time.monotonic`; 0.0 while there is one, or was none yet.
    """

    __slots__ = (
        "_head",
        "_is_between",
        "_known",
        "_missing",
        "_parts",
        "_pattern",
        "_receiving",
        "_unlike",
        "cycle",
        "idle_since_s",
        "is_parsed",
        "last",
        "max_body_bytes",
        "preamble",
        "protocol",
        "relay",
        "running",
        "transport",
    )

    def __init__(
        self, protocol: RelayProtocol, transport: Any, relay: RelayContext, preamble: Preamble, limit: int
    ) -> None:
        self.protocol: Any = protocol
        self.transport = transport
        self.relay = relay
        self.preamble = preamble
        self.max_body_bytes = limit
        self.cycle: RequestCycle | None = None
        self.running: RequestCycle | None = None
        self.last: RequestHead | None = None
        self.is_parsed = True
        self.idle_since_s = 0.0
        self._is_between = True  # the parser is: it waits for the first byte of a message
        self._head: bytes | None = None  # what the parser is fed, from the beginning of a message
        self._pattern: HeadPattern | None = None
        self._known: RequestHead | None = None
        self._receiving: RequestCycle | None = None
        self._parts: list[bytes] = []
        self._missing = 0
        self._unlike = 0  # heads in a row that were not known

    def take(self, data: bytes) -> bool:
        """Take what came, if it is a request whose head is known, or more of its body; if not, it is to be parsed."""
        self.idle_since_s = 0.0
        if self._receiving is not None:
            self._receive(self._receiving, data)
            return True
        pattern, known, last = self._pattern, self._known, self.cycle
        if pattern is not None and known is not None and self._is_between and (last is None or last.response_complete):
            begins = pattern.body_begins(data)
            length = pattern.length
            if begins >= 0 and length <= self.max_body_bytes:
                cycle = RequestCycle(self, known)
                self.cycle = self.protocol.cycle = cycle
                self.is_parsed = False
                self._unlike = 0
                more = len(data) - begins - length
                if more == 0:
                    cycle.begin(data[begins:])
                elif more < 0:
                    self._parts, self._missing, self._receiving = [data[begins:]], -more, cycle
                else:
                    cycle.begin(data[begins : begins + length])
                    self.protocol.data_received(data[begins + length :])
                return True
        self.is_parsed = True
        if self._is_between:
            self._head = data
        return False

    def _receive(self, cycle: RequestCycle, data: bytes) -> None:
        more = len(data) - self._missing
        self._missing = -more
        if more < 0:
            self._parts.append(data)
            return
        self._receiving = None
        parts, self._parts = self._parts, []
        parts.append(data if more == 0 else data[: len(data) - more])
        cycle.begin(b"".join(parts))
        if more:
            self.protocol.data_received(data[len(data) - more :])

    def parsing(self) -> None:
        """Know that the parser has begun a message."""
        self._is_between = False

    def parsed(self) -> None:
        """Know that it has ended one."""
        self._is_between = True
        self._head = None  # of a message that follows in the same bytes, the beginning is not known

    def learn(self, head: RequestHead) -> None:
        """Keep the head of a request of the relay, from a connection's second one on: many have just one.

        Where all heads differ, as with an id of the request in them, one in 16 is kept, in case that changes.
        """
        last, self.last = self.last, head
        if last is None or self._head is None or head.expects or not (head.keep_alive and head.announced):
            return
        if any(name == b"upgrade" for name, _ in head.headers):
            return
        self._unlike += 1
        if self._unlike > 16 and self._unlike % 16:
            return
        pattern = pattern_of(self._head)
        if pattern is not None and head.announced == b"%d" % pattern.length:
            self._pattern, self._known = pattern, head

    def forget(self) -> None:
        """Parse the next request: another protocol has had the connection meanwhile."""
        self._pattern = self._known = None

    def answered(self) -> None:
        """Know that the last request was."""
        if self.protocol is None:
            return
        if self.is_parsed:
            self.protocol.on_response_complete()
        else:
            self.idle_since_s = time.monotonic()

    def close(self) -> None:
        """Give up what runs, and let go of what refers to this: nobody should have to look for the two."""
        running, self.running = self.running, None
        self.protocol = self.cycle = self._receiving = None
        if running is not None:  # uvicorn tells the last request alone, which may wait behind this one
            running.disconnected = True
            running.set()
