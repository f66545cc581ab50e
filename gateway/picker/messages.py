"""The messages of ext_proc that the picker sends, and what it reads of those that it gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from gateway.http.headers import Header
from gateway.picker.ext_proc_pb2 import (
    HeaderMap,
    HeaderMutation,
    HttpStatus,
    ImmediateResponse,
    Metadata,
    ProcessingResponse,
)

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
REQUEST: Final = "x-gateway-request"
SERVED: Final = "x-gateway-destination-endpoint-served"
NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
PIECE_BYTES: Final = 60 * 1024
"""Longest piece of a body: some proxies take no more than 64 KiB in one message."""

# Tags of fields (field number << 3 | 2), by the messages that they are in. Such messages are written field by field: it
# takes a third of the time that protobuf's objects take.
_REQUEST_HEADERS: Final = 0x0A  # ProcessingResponse
_RESPONSE_HEADERS: Final = 0x12
_REQUEST_BODY: Final = 0x1A
_RESPONSE_BODY: Final = 0x22
_REQUEST_TRAILERS: Final = 0x2A
_RESPONSE_TRAILERS: Final = 0x32
_DYNAMIC_METADATA: Final = 0x42
_RESPONSE: Final = 0x0A  # HeadersResponse, BodyResponse
_HEADER_MUTATION: Final = 0x12  # CommonResponse
_BODY_MUTATION: Final = 0x1A
_SET_HEADERS: Final = 0x0A  # HeaderMutation
_REMOVE_HEADERS: Final = 0x12
_HEADER: Final = 0x0A  # HeaderValueOption
_OVERWRITE: Final = b"\x18\x02"  # append_action: OVERWRITE_IF_EXISTS_OR_ADD
_KEY: Final = 0x0A  # HeaderValue, and an entry of a map
_RAW_VALUE: Final = 0x1A  # HeaderValue
_STREAMED_RESPONSE: Final = 0x1A  # BodyMutation
_BODY: Final = 0x0A  # StreamedBodyResponse
_END_OF_STREAM: Final = b"\x10\x01"
_FIELDS: Final = 0x0A  # Struct
_VALUE: Final = 0x12  # an entry of a map
_STRING: Final = 0x1A  # Value
_STRUCT: Final = 0x2A


def headers_of(received: HeaderMap) -> list[Header]:
    """Return the headers that a proxy sent, those of HTTP/2 such as `:path` included."""
    return [(each.key.encode(), each.raw_value or each.value.encode()) for each in received.headers]


def subset_of(metadata: Metadata) -> frozenset[str] | None:
    """Return the destinations that the proxy allows; None for all."""
    values = metadata.filter_metadata
    if SUBSET_NAMESPACE not in values or SUBSET not in values[SUBSET_NAMESPACE].fields:
        return None
    value = values[SUBSET_NAMESPACE].fields[SUBSET]
    texts = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return frozenset(text.strip() for text in texts) - {""}


def served_of(metadata: Metadata) -> str:
    """Return the destination that has answered; empty if the proxy does not tell."""
    return _text_of(metadata, SERVED)


def request_of(metadata: Metadata) -> str:
    """Return the name that the picker gave to a request; empty if it does not know it."""
    return _text_of(metadata, REQUEST)


def forward(destinations: str, request: str, headers: Iterable[Header], removed: Iterable[bytes]) -> bytes:
    """Return the answer to a request's headers: where it goes, and which headers it has there."""
    value = destinations.encode()
    mutation = _header(DESTINATION.encode(), value) + b"".join(_header(*each) for each in headers)
    mutation += b"".join(_field(_REMOVE_HEADERS, name) for name in removed)
    known = _entry(DESTINATION, _field(_STRING, value)) + _entry(REQUEST, _field(_STRING, request.encode()))
    metadata = _field(_DYNAMIC_METADATA, _entry(NAMESPACE, _field(_STRUCT, known)))
    return _field(_REQUEST_HEADERS, _field(_RESPONSE, _field(_HEADER_MUTATION, mutation))) + metadata


def request_body(body: bytes, *, is_last: bool) -> Iterator[bytes]:
    """Yield the pieces of a request's body for the backend; an empty body is one empty piece."""
    size = len(body)
    if size <= PIECE_BYTES:
        yield _piece(_REQUEST_BODY, body, is_last=is_last)
        return
    whole = memoryview(body)
    for begin in range(0, size, PIECE_BYTES):
        part = whole[begin : begin + PIECE_BYTES]
        yield _piece(_REQUEST_BODY, part, is_last=is_last and begin + PIECE_BYTES >= size)


def request_trailers() -> bytes:
    """Return the answer to a request's trailers, which stay."""
    return _field(_REQUEST_TRAILERS, b"")


def response_headers(headers: Iterable[Header]) -> bytes:
    """Return the answer to the headers of an answer."""
    mutation = b"".join(_header(*each) for each in headers)
    return _field(_RESPONSE_HEADERS, _field(_RESPONSE, _field(_HEADER_MUTATION, mutation)))


def response_body(body: bytes, *, is_streamed: bool, is_last: bool) -> bytes:
    """Return the answer to a piece of an answer's body, which is passed on."""
    return _piece(_RESPONSE_BODY, body, is_last=is_last) if is_streamed else _field(_RESPONSE_BODY, b"")


def response_trailers() -> bytes:
    """Return the answer to an answer's trailers, which stay."""
    return _field(_RESPONSE_TRAILERS, b"")


def immediate(status: int, headers: Iterable[Header], body: bytes) -> bytes:
    """Return an answer that the client gets from the proxy, in place of a backend's."""
    mutation = b"".join(_header(*each) for each in headers)
    response = ImmediateResponse(status=HttpStatus(code=status), headers=HeaderMutation.FromString(mutation), body=body)
    serialized: bytes = ProcessingResponse(immediate_response=response).SerializeToString()
    return serialized


def _text_of(metadata: Metadata, name: str) -> str:
    values = metadata.filter_metadata
    if NAMESPACE not in values or name not in values[NAMESPACE].fields:
        return ""
    text: str = values[NAMESPACE].fields[name].string_value
    return text


def _field(tag: int, value: bytes) -> bytes:
    """Return a field of bytes or of a message."""
    return b"%c%b%b" % (tag, _varint(len(value)), value)


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    return bytes((value & 127 | 128,)) + _varint(value >> 7)


def _header(name: bytes, value: bytes) -> bytes:
    """Return a header of a mutation, which takes the place of one with its name."""
    return _field(_SET_HEADERS, _field(_HEADER, _field(_KEY, name) + _field(_RAW_VALUE, value)) + _OVERWRITE)


def _entry(name: str, value: bytes) -> bytes:
    """Return a field of a `google.protobuf.Struct`."""
    return _field(_FIELDS, _field(_KEY, name.encode()) + _field(_VALUE, value))


def _piece(tag: int, body: bytes | memoryview, *, is_last: bool) -> bytes:
    """Return a piece of a body that the proxy passes on."""
    size = len(body)
    head, tail = (b"%c%b" % (_BODY, _varint(size)) if size else b""), (_END_OF_STREAM if is_last else b"")
    for outer in (_STREAMED_RESPONSE, _BODY_MUTATION, _RESPONSE, tag):
        head = b"%c%b%b" % (outer, _varint(len(head) + size + len(tail)), head)
    return b"".join((head, body, tail))
