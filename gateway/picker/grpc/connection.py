"""A connection of HTTP/2, as a server of gRPC needs it (RFC 9113). Nothing of it is kept without a bound.

What a turn of the event loop has to send is written at its end, at once. A peer that does not read is not read either.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, Final, Protocol

from gateway.picker.grpc import frames
from gateway.picker.grpc.call import UNIMPLEMENTED, WINDOW_BYTES, Call, Handler
from gateway.picker.grpc.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HAS_PRIORITY,
    HEAD,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MOST_WINDOW,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    Http2Error,
    StreamError,
    frame,
    number,
)
from gateway.picker.grpc.heads import HEADERS_BYTES, HeadReader

MOST_CALLS: Final = 1024
"""Most calls of a connection at a time; a proxy opens another one for more."""
CONNECTION_WINDOW_BYTES: Final = 16 << 20
MOST_UNSENT_BYTES: Final = 16 << 20
"""What may wait for one connection before no more is asked for; and before its transport says that it is slow."""
_BUFFER_BYTES: Final = 1 << 20

MOST_FRUITLESS: Final = 4096
"""Frames in a row that cost something and bring nothing, such as pings, and calls cancelled before their answer."""
_FRUITLESS_PER_S: Final = 256.0

_FRAMES_IN_A_ROW: Final = 512
"""Frames and messages that are handled before other connections have their turn."""

BEGIN_S: Final = 10.0
"""Seconds that a peer has to begin, and to complete a frame or a header block."""
_STALL_S: Final = 60.0
"""Seconds that a peer may take to receive something."""
_SILENT_S: Final = 30.0
"""Seconds without a byte of a peer after which it is asked whether it is still there, and has the same time again."""
_IS_THERE: Final = frame(PING, 0, 0, b"is there")
_LAST_CALLS: Final = b"lastcall"
_HELLO: Final = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: MOST_CALLS,
        INITIAL_WINDOW_SIZE: WINDOW_BYTES,
        frames.MAX_HEADER_LIST_SIZE: HEADERS_BYTES,
    }
) + frame(WINDOW_UPDATE, 0, 0, number(CONNECTION_WINDOW_BYTES - 65_535))


class Services(Protocol):
    """What a server serves, and its connections."""

    connections: set[Any]

    def begin(self, path: bytes, call: Call) -> Handler | None:
        """Return what answers a call to a path; None if there is nothing there."""

    def opened(self, connection: Connection) -> None:
        """Register a new connection, once any TLS handshake is complete."""

    def lost(self, connection: Connection) -> None:
        """Forget a connection."""

    def hold(self, connection: Connection) -> None:
        """Count what a connection holds of incomplete messages."""

    def note_fault(self, text: str) -> None:
        """Log why a connection ends."""


class Connection:
    """A connection, which hands the messages of its calls to their handlers in the call that read them.

    It implements `asyncio.Protocol` without inheriting from it, so that mypyc can compile it.
    """

    __slots__ = (
        "_answered",
        "_block",
        "_block_flags",
        "_block_stream",
        "_budget",
        "_calls",
        "_changed_s",
        "_first_send_window",
        "_fruitless",
        "_fruitless_s",
        "_has_begun",
        "_has_preface",
        "_heads",
        "_is_closing",
        "_is_leaving",
        "_is_reading",
        "_last_stream",
        "_out",
        "_pending",
        "_read_s",
        "_receive_window",
        "_services",
        "_transport",
        "_unsent_bytes",
        "_waiting",
        "_was_asked",
        "_will_flush",
        "counted_bytes",
        "held_bytes",
        "is_slow",
        "send_window",
    )

    def __init__(self, services: Services) -> None:
        self._services = services
        self._transport: Any = None
        self._heads = HeadReader()
        self._calls: dict[int, Call] = {}
        self._waiting: dict[int, Call] = {}  # with something unsent
        self._answered: list[Call] = []  # whose handlers have not been told
        self._unsent_bytes = 0
        self._out: list[bytes | memoryview] = []
        self._pending = b""  # an incomplete frame, or what waits for the next turn
        self._block: bytearray | None = None  # of headers, as long as it is incomplete
        self._block_stream = self._block_flags = 0
        self._last_stream = 0
        self._first_send_window = 65_535
        self._receive_window = CONNECTION_WINDOW_BYTES
        self.send_window = 65_535  # what the peer accepts now, over all calls
        self.held_bytes = self.counted_bytes = 0
        self._has_preface = self._has_begun = False
        self._is_reading = self._will_flush = self._is_closing = self.is_slow = False
        self._is_leaving = False  # new calls are ignored
        self._was_asked = False
        self._budget = 0
        self._fruitless = MOST_FRUITLESS
        self._changed_s = self._read_s = self._fruitless_s = time.monotonic()

    # Called by asyncio

    def connection_made(self, transport: Any) -> None:
        """Greet the peer."""
        self._transport = transport
        transport.set_write_buffer_limits(_BUFFER_BYTES)
        transport.write(_HELLO)
        self._services.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls, and break the reference cycles."""
        self._is_closing = True
        self._transport = None
        self._pending = b""
        self._out.clear()
        self._tell()
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.drop()
        self._services.lost(self)

    def eof_received(self) -> bool:
        """Return False, so that the transport closes itself and calls `connection_lost`."""
        return False

    def pause_writing(self) -> None:
        """Read no more while the peer is slow to receive."""
        self.is_slow = True
        self._changed_s = time.monotonic()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Send what has waited, and read again."""
        self.is_slow = False
        self._pump()
        self._go_on()

    def data_received(self, data: bytes) -> None:
        """Handle frames, and answer them all at once."""
        self._read_s = time.monotonic()
        self._was_asked = False
        if self._pending:
            data, self._pending = self._pending + data, b""
        else:
            self._changed_s = self._read_s
        self._read(data)

    # Reading

    def _read(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._is_reading = True
        self._budget = _FRAMES_IN_A_ROW
        try:
            at = self._read_frames(data)
        except Http2Error as fault:
            self._fail(fault)
            return
        finally:
            self._is_reading = False
        self._pending = data[at:]
        if at and self._block is None:
            self._changed_s = self._read_s
        if self.held_bytes != self.counted_bytes:
            self._services.hold(self)
        if self._budget <= 0 and self._transport is not None and not self.is_slow:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)
        self._flush()

    def _go_on(self) -> None:
        """Read what has waited for its turn, and then more."""
        if self._is_closing or self.is_slow:
            return
        self._transport.resume_reading()
        data, self._pending = self._pending, b""
        self._read(data)

    def _read_frames(self, data: bytes) -> int:
        """Handle the complete frames, and return the offset after them."""
        at, size = 0, len(data)
        if not self._has_preface:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise Http2Error(PROTOCOL_ERROR, "expected HTTP/2 with prior knowledge")
            if size < len(PREFACE):
                return 0
            self._has_preface = True
            at = len(PREFACE)
        while size - at >= 9 and self._budget > 0:
            length_and_kind, flags, stream = HEAD.unpack_from(data, at)
            length, kind = length_and_kind >> 8, length_and_kind & 255
            if length > FRAME_BYTES:
                raise Http2Error(FRAME_SIZE_ERROR, f"a frame of {length} bytes; at most {FRAME_BYTES} are accepted")
            begin = at + 9
            if begin + length > size:
                break
            at = begin + length
            self._budget -= 1
            stream &= MOST_WINDOW
            try:
                self._on_frame(kind, flags, stream, data, begin, at)
            except StreamError as fault:
                self._reset(stream, fault.code)
            if self._is_closing or self._has_left():
                break
        return at

    def _on_frame(self, kind: int, flags: int, stream: int, data: bytes, begin: int, end: int) -> None:
        if self._block is not None and (kind != CONTINUATION or stream != self._block_stream):
            raise Http2Error(PROTOCOL_ERROR, "a frame within a header block")
        if not self._has_begun:
            if kind != SETTINGS or flags & ACK:
                raise Http2Error(PROTOCOL_ERROR, "expected settings first")
            self._has_begun = True
        if kind == DATA:
            self._on_data(flags, stream, data, begin, end)
        elif kind == HEADERS:
            self._on_headers(flags, stream, data, begin, end)
        elif kind == WINDOW_UPDATE:
            self._on_window_update(stream, data[begin:end])
        else:
            self._on_other_frame(kind, flags, stream, data[begin:end])

    def _on_other_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == CONTINUATION:
            self._on_continuation(flags, payload)
        elif kind == RST_STREAM:
            self._on_reset(stream, len(payload))
        elif kind == SETTINGS:
            self._on_settings(flags, stream, payload)
        elif kind == PING:
            self._on_ping(flags, stream, payload)
        elif kind == PUSH_PROMISE:
            raise Http2Error(PROTOCOL_ERROR, "a client cannot push")
        elif kind == GOAWAY:
            if stream or len(payload) < 8:
                raise Http2Error(PROTOCOL_ERROR if stream else FRAME_SIZE_ERROR, "a wrong GOAWAY")
            self._is_leaving = True
        else:
            self._spend()
            if kind == PRIORITY and not stream:
                raise Http2Error(PROTOCOL_ERROR, "a priority of no stream")
            if kind == PRIORITY and len(payload) != 5:
                raise StreamError(FRAME_SIZE_ERROR)

    def _spend(self) -> None:
        """Count a frame that costs something and brings nothing."""
        self._fruitless -= 1
        if self._fruitless < 0:
            now_s = time.monotonic()
            self._fruitless = min(MOST_FRUITLESS, int((now_s - self._fruitless_s) * _FRUITLESS_PER_S))
            self._fruitless_s = now_s
            if not self._fruitless:
                raise Http2Error(ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def _on_data(self, flags: int, stream: int, data: bytes, begin: int, end: int) -> None:
        size = end - begin
        self._receive_window -= size
        if self._receive_window < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "more data than was asked for")
        if flags & PADDED:
            begin, end = _unpadded(data, begin, end)
        call = self._call_of(stream)
        if size == 0 and not flags & END_STREAM:
            self._spend()
        if call is not None:
            if call.is_half_closed:
                raise StreamError(STREAM_CLOSED)
            messages = call.messages
            call.receive(data, begin, end, size)
            self._budget -= call.messages - messages
            if flags & END_STREAM:
                call.half_close()
        self._ask_for_more()

    def _call_of(self, stream: int) -> Call | None:
        """Return the call of a stream; None if it has ended."""
        call = self._calls.get(stream)
        if call is None and (stream > self._last_stream or not stream & 1) and not self._is_leaving:
            raise Http2Error(PROTOCOL_ERROR, f"stream {stream} has not begun")
        return call

    def _ask_for_more(self) -> None:
        room = self._receive_window
        if room <= CONNECTION_WINDOW_BYTES // 2 and self._unsent_bytes <= MOST_UNSENT_BYTES:
            self._receive_window = CONNECTION_WINDOW_BYTES
            self.write(frame(WINDOW_UPDATE, 0, 0, number(CONNECTION_WINDOW_BYTES - room)))

    def _on_headers(self, flags: int, stream: int, data: bytes, begin: int, end: int) -> None:
        if flags & PADDED:
            begin, end = _unpadded(data, begin, end)
        if flags & HAS_PRIORITY:
            begin += 5
        if begin > end or not stream & 1:
            raise Http2Error(PROTOCOL_ERROR, "wrong headers")
        if flags & END_HEADERS:
            self._on_block(flags, stream, data[begin:end])
        else:
            self._block, self._block_flags, self._block_stream = bytearray(data[begin:end]), flags, stream

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        self._spend()
        block = self._block
        if block is None:
            raise Http2Error(PROTOCOL_ERROR, "no header block to go on with")
        block += payload
        if len(block) > HEADERS_BYTES:
            raise Http2Error(ENHANCE_YOUR_CALM, f"a header block of more than {HEADERS_BYTES} bytes")
        if flags & END_HEADERS:
            self._block = None
            self._on_block(self._block_flags, self._block_stream, bytes(block))

    def _on_block(self, flags: int, stream: int, block: bytes) -> None:
        """Handle a complete block of headers: a call, or the trailers of one."""
        head, is_last = self._heads.read(block), flags & END_STREAM != 0
        if stream <= self._last_stream:
            call = self._calls.get(stream)
            if call is None and not is_last:  # trailers may be on their way when a call ends
                raise Http2Error(STREAM_CLOSED, f"stream {stream} begins again")
            if call is not None:
                if call.is_half_closed or not is_last or not head.is_trailers:
                    raise StreamError(STREAM_CLOSED if call.is_half_closed else PROTOCOL_ERROR)
                call.half_close()
            return
        if self._is_leaving:
            return
        self._last_stream = stream
        if not head.is_request:
            raise StreamError(PROTOCOL_ERROR)
        if len(self._calls) >= MOST_CALLS:
            raise StreamError(frames.REFUSED_STREAM)
        call = Call(self, stream, self._first_send_window)
        self._calls[stream] = call
        if not head.is_grpc:
            self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, frames.UNSUPPORTED_MEDIA_TYPE))
            self._reset(stream, NO_ERROR)
            return
        call.is_half_closed = is_last
        call.handler = self._services.begin(head.path, call)
        if call.handler is None:
            call.fail(UNIMPLEMENTED, f"There is nothing at {head.path.decode('latin-1')}.")
        elif is_last:
            call.half_close()

    def _on_window_update(self, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(FRAME_SIZE_ERROR, "a wrong WINDOW_UPDATE")
        more = int.from_bytes(payload, "big") & MOST_WINDOW
        if not stream:
            self.send_window += more
            if not more or self.send_window > MOST_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR, "a wrong window")
            self._pump()
            return
        call = self._call_of(stream)
        if call is not None:
            call.send_window += more
            if not more or call.send_window > MOST_WINDOW:
                raise StreamError(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
            call.pump()

    def _on_reset(self, stream: int, size: int) -> None:
        if size != 4:
            raise Http2Error(FRAME_SIZE_ERROR, "a wrong RST_STREAM")
        call = self._call_of(stream)
        if call is None:
            return
        if not call.has_begun:
            self._spend()
        self._forget(call)
        call.drop()

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise Http2Error(PROTOCOL_ERROR, "settings of a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise Http2Error(FRAME_SIZE_ERROR, "wrong settings")
        if flags & ACK:
            return
        self._spend()
        for name, value in SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW_SIZE:
                if value > MOST_WINDOW:
                    raise Http2Error(FLOW_CONTROL_ERROR, "a window that is too large")
                more = value - self._first_send_window
                self._first_send_window = value
                for call in self._calls.values():
                    call.send_window += more
                    if call.send_window > MOST_WINDOW:
                        raise Http2Error(FLOW_CONTROL_ERROR, "a window that is too large")
            elif name == MAX_FRAME_SIZE and not FRAME_BYTES <= value < 1 << 24:
                raise Http2Error(PROTOCOL_ERROR, "a wrong MAX_FRAME_SIZE")
            elif name == frames.ENABLE_PUSH and value > 1:
                raise Http2Error(PROTOCOL_ERROR, "a wrong ENABLE_PUSH")
        self.write(frame(SETTINGS, ACK, 0, b""))
        self._pump()

    def _on_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) != 8:
            raise Http2Error(PROTOCOL_ERROR if stream else FRAME_SIZE_ERROR, "a wrong ping")
        self._spend()
        if not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))
        elif payload == _LAST_CALLS:
            self.write(frames.goaway(self._last_stream, NO_ERROR))
            self._is_leaving = True

    # Writing; see `gateway.picker.grpc.call.Line`

    def write(self, data: bytes | memoryview) -> None:
        """Write at the end of the turn."""
        if self._transport is None:
            return
        self._out.append(data)
        if not self._is_reading and not self._will_flush:
            self._will_flush = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = True
        self._tell()
        self._will_flush = False
        out = self._out
        if out and self._transport is not None:
            self._out = []
            self._transport.write(b"".join(out))
        if self._has_left() and self._transport is not None:
            self._is_closing = True
            self._changed_s = time.monotonic()
            self._transport.close()

    def _tell(self) -> None:
        """Close the handlers of the calls that have been answered."""
        while self._answered:
            self._answered.pop().drop()

    def _pump(self) -> None:
        self._budget -= len(self._waiting) // 8
        for call in list(self._waiting.values()):
            if self.is_slow or not self.send_window:
                break
            del self._waiting[call.id]  # the next time it comes after the others
            if call.unsent_bytes:
                self._waiting[call.id] = call
            call.pump()

    def wait(self, call: Call, unsent_bytes: int) -> None:
        """Count more, or less, bytes of a call that wait for room."""
        self._unsent_bytes += unsent_bytes
        if call.unsent_bytes:
            self._waiting[call.id] = call
        else:
            self._waiting.pop(call.id, None)
        if unsent_bytes < 0:
            self._ask_for_more()

    def answered(self, call: Call) -> None:
        """Forget a call, of which everything has been written."""
        self._forget(call)
        self._answered.append(call)

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.id, None)

    def _reset(self, stream: int, code: int) -> None:
        """End a stream of which the peer has broken the rules."""
        if code != NO_ERROR:
            self._spend()
        self.write(frame(RST_STREAM, 0, stream, number(code)))
        call = self._calls.pop(stream, None)
        if call is not None:
            call.drop()

    # Ending

    def _fail(self, fault: Http2Error) -> None:
        self._services.note_fault(fault.text)
        self.write(frames.goaway(self._last_stream, fault.code, fault.text))
        self._close()

    def _close(self) -> None:
        """Close after what is to be written."""
        self._is_closing = True
        self._changed_s = time.monotonic()
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _has_left(self) -> bool:
        """Return whether either side has sent GOAWAY and no calls are left."""
        return self._is_leaving and not self._calls

    def shutdown(self) -> None:
        """Announce the end of the connection (GOAWAY); calls that are already on their way are answered."""
        if not self._has_begun:
            self._close()
        elif not self._is_leaving and not self._is_closing:
            self.write(frames.goaway(MOST_WINDOW, NO_ERROR) + frame(PING, 0, 0, _LAST_CALLS))

    def end(self, status: int, text: str) -> None:
        """Close now; calls end with a status."""
        if not self._is_closing:
            for call in list(self._calls.values()):
                call.fail(status, text)
            self._close()

    def abort(self) -> None:
        """Close without waiting for the peer."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def idle_since_s(self) -> float:
        """Return when something was last read of a connection without calls; infinity of one with calls."""
        return math.inf if self._calls else self._read_s

    def check(self, now_s: float) -> None:
        """Close the connection if its peer takes too long, or is gone."""
        if self._transport is None:
            return
        is_incomplete = self._pending or self._block is not None or not self._has_begun
        silent_s, unchanged_s = now_s - self._read_s, now_s - self._changed_s
        limit_s = _STALL_S if self.is_slow or self._is_closing else BEGIN_S if is_incomplete else math.inf
        if unchanged_s > limit_s or (self._was_asked and silent_s > 2 * _SILENT_S):
            self.abort()
        elif silent_s > _SILENT_S and not self._was_asked:
            self._was_asked = True
            self.write(_IS_THERE)
        for call in list(self._waiting.values()):
            if now_s - call.waits_since_s > _STALL_S:
                self._reset(call.id, frames.CANCEL)


def _unpadded(data: bytes, begin: int, end: int) -> tuple[int, int]:
    if begin == end or data[begin] >= end - begin:
        raise Http2Error(PROTOCOL_ERROR, "more padding than payload")
    return begin + 1, end - data[begin]
