"""What a connection's header blocks say. A block that changes no table is decoded once."""

from __future__ import annotations

import re
from typing import Any, Final, cast

from hpack import Decoder, HPACKError

from gateway.picker.grpc.frames import COMPRESSION_ERROR, Http2Error

HEADERS_BYTES: Final = 16 * 1024
"""Most bytes of a block's header fields, each counted as its bytes and 32 more."""

_MOST_KNOWN: Final = 64
_IS_TOKEN: Final = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_IS_NO_VALUE: Final = re.compile(rb"[\0\r\n]|^[ \t]|[ \t]$").search
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_REQUIRED: Final = frozenset({b":method", b":scheme", b":path"})
_OF_CONNECTIONS: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)


class RequestHead:
    """What a block of header fields says."""

    __slots__ = ("is_grpc", "is_request", "is_trailers", "path")

    def __init__(self, fields: list[tuple[bytes, bytes]]) -> None:
        pseudo = {name: value for name, value in fields if name.startswith(b":")}
        values = dict(fields)
        is_ordered = all(name.startswith(b":") for name, _ in fields[: len(pseudo)])
        is_once = sum(name.startswith(b":") for name, _ in fields) == len(pseudo)
        is_valid = is_ordered and is_once and _PSEUDO.issuperset(pseudo) and _OF_CONNECTIONS.isdisjoint(values)
        is_valid &= all(_IS_TOKEN(name) and not _IS_NO_VALUE(value) for name, value in fields)
        is_valid &= values.get(b"te", b"trailers") == b"trailers"
        self.path = pseudo.get(b":path", b"")  # the value of `:path`
        # is_request, is_trailers: whether it is well-formed as the one or the other.
        self.is_request = is_valid and _REQUIRED.issubset(pseudo) and self.path != b""
        self.is_trailers = is_valid and not pseudo
        kind = values.get(b"content-type", b"")
        is_grpc = kind.startswith(b"application/grpc") and kind[16:17] in {b"", b"+", b";"}
        self.is_grpc = is_grpc and pseudo.get(b":method") == b"POST"  # whether it is of a POST with a body of gRPC


class HeadReader:
    """Decodes the header blocks of a connection, in their order.

    A proxy sends the same block with each request once the tables hold what is in it.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(HEADERS_BYTES)
        self._known: dict[bytes, RequestHead] = {}

    def read(self, block: bytes) -> RequestHead:
        """Decode the next block."""
        head = self._known.get(block)
        if head is not None:
            return head
        before = self._table_state()
        try:
            fields = cast("list[tuple[bytes, bytes]]", self._decoder.decode(block, raw=True))
        except HPACKError:  # its text may show addresses in memory
            raise Http2Error(COMPRESSION_ERROR, "the header block cannot be decoded") from None
        head = RequestHead(fields)
        latest, entries, size = self._table_state()
        is_same = latest is before[0] and entries == before[1] and size == before[2]
        if not is_same or len(self._known) == _MOST_KNOWN:
            self._known.clear()
        else:
            self._known[block] = head
        return head

    def _table_state(self) -> tuple[object, int, int]:
        """Return what differs after each change of the table: its latest entry, their number and its size."""
        table: Any = self._decoder.header_table  # compiled code makes a tuple anew wherever it knows its types
        entries = table.dynamic_entries
        return entries[0] if entries else None, len(entries), table.maxsize
