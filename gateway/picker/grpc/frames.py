"""The frames of HTTP/2 as bytes (RFC 9113), and the header blocks that a gRPC server answers with."""

from __future__ import annotations

from struct import Struct
from typing import Final
from urllib.parse import quote

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES: Final = 16_384
"""Longest payload of a frame, in both directions: what every peer accepts."""
MOST_WINDOW: Final = 2**31 - 1

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

HEAD: Final = Struct(">IBI")
"""The first nine bytes of a frame: its length and kind in one number, its flags, and its stream."""
SETTING: Final = Struct(">HI")

_NOT_QUOTED: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_MOST_TEXT: Final = 1024


class Http2Error(Exception):
    """What ends a connection."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code  # error code of RFC 9113, section 7
        self.text = text


class StreamError(Exception):
    """What ends a stream; the attribute is as above."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame."""
    return HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def number(value: int) -> bytes:
    """Return the payload of a frame that has one number."""
    return value.to_bytes(4, "big")


def settings(values: dict[int, int]) -> bytes:
    """Return a frame with settings."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*value) for value in values.items()))


def goaway(last_stream: int, code: int, text: str = "") -> bytes:
    """Return the frame after which there are no streams above the last one."""
    return frame(GOAWAY, 0, 0, number(last_stream) + number(code) + text.encode())


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field that no table remembers (RFC 7541, section 6.2.2), with a name of less than 127 bytes.

    Examples
    --------
    >>> literal(b"a", b"bc") == b"".join((bytes(1), bytes((1,)), b"a", bytes((2,)), b"bc"))
    True
    """
    size = len(value)
    length = bytearray((min(size, 127),))
    if size >= 127:  # section 5.1
        size -= 127
        while size >= 128:
            length.append(size & 127 | 128)
            size >>= 7
        length.append(size)
    return b"\0%c%b%b%b" % (len(name), name, bytes(length), value)


_OK: Final = b"\x88"  # `:status: 200` of the static table
ANSWER_HEAD: Final = _OK + literal(b"content-type", b"application/grpc")
UNSUPPORTED_MEDIA_TYPE: Final = literal(b":status", b"415")


def trailers(status: int, text: str) -> bytes:
    """Return the header block that ends an answer.

    Examples
    --------
    >>> trailers(3, "50%").endswith(b"50%25")
    True
    """
    block = literal(b"grpc-status", b"%d" % status)
    if text:
        block += literal(b"grpc-message", quote(text[:_MOST_TEXT], safe=_NOT_QUOTED).encode())
    return block
