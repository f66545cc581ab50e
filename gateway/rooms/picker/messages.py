"""Writes the messages of ext_proc that the picker sends, and reads those that it receives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from gateway.http.headers import Header
from gateway.rooms.picker.ext_proc_pb2 import (
    HeaderMap,
    HeaderMutation,
    HeaderValueOption,
    Metadata,
    ProcessingResponse,
    TrailersResponse,
)

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
REQUEST: Final = "x-gateway-request"
SERVED: Final = "x-gateway-destination-endpoint-served"
NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
PIECE_BYTES: Final = 60 * 1024
"""Longest piece of a body: some proxies accept at most 64 KiB per message."""
REQUEST_TRAILERS: Final = ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString()
RESPONSE_TRAILERS: Final = ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString()
"""The answer to trailers, which stay unchanged."""


def headers_of(received: HeaderMap) -> list[Header]:
    """Return the headers that a proxy sent, including those of HTTP/2 such as `:path`."""
    return [(each.key.encode(), each.raw_value or each.value.encode()) for each in received.headers]


def subset_of(metadata: Metadata) -> frozenset[str] | None:
    """Return the destinations that the proxy allows; None for all."""
    values = metadata.filter_metadata
    if SUBSET_NAMESPACE not in values or SUBSET not in values[SUBSET_NAMESPACE].fields:
        return None
    value = values[SUBSET_NAMESPACE].fields[SUBSET]
    texts = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return frozenset(text.strip() for text in texts) - {""}


def text_of(metadata: Metadata, name: str) -> str:
    """Return the proxy's metadata under a name, `SERVED` or `REQUEST`; empty if there is none."""
    values = metadata.filter_metadata
    if NAMESPACE not in values or name not in values[NAMESPACE].fields:
        return ""
    text: str = values[NAMESPACE].fields[name].string_value
    return text


def forward(destinations: str, request: str, headers: Iterable[Header], removed: Iterable[str]) -> bytes:
    """Return the answer to a request's headers: its destinations, and the headers to set and remove."""
    answer = ProcessingResponse()
    _set(answer.request_headers.response.header_mutation, [(DESTINATION.encode(), destinations.encode()), *headers])
    answer.request_headers.response.header_mutation.remove_headers.extend(removed)
    answer.dynamic_metadata.update({NAMESPACE: {DESTINATION: destinations, REQUEST: request}})
    return answer.SerializeToString()


def request_body(body: bytes, *, is_last: bool) -> Iterator[bytes]:
    """Yield the pieces of a request's body for the backend; an empty body is one empty piece."""
    for begin in range(0, len(body) or 1, PIECE_BYTES):
        answer, end = ProcessingResponse(), begin + PIECE_BYTES
        piece = answer.request_body.response.body_mutation.streamed_response
        piece.body, piece.end_of_stream = body[begin:end], is_last and end >= len(body)
        yield answer.SerializeToString()


def response_headers(headers: Iterable[Header]) -> bytes:
    """Return the answer to the headers of an answer."""
    answer = ProcessingResponse()
    answer.response_headers.SetInParent()  # even without headers
    _set(answer.response_headers.response.header_mutation, headers)
    return answer.SerializeToString()


def response_body(body: bytes, *, is_last: bool) -> bytes:
    """Return the answer to a piece of an answer's body: pass it on."""
    answer = ProcessingResponse()
    piece = answer.response_body.response.body_mutation.streamed_response
    piece.body, piece.end_of_stream = body, is_last
    return answer.SerializeToString()


def immediate(status: int, headers: Iterable[Header], body: bytes) -> bytes:
    """Return an answer for the proxy to send to the client, in place of a backend's."""
    answer = ProcessingResponse()
    answer.immediate_response.status.code = status
    answer.immediate_response.body = body
    _set(answer.immediate_response.headers, headers)
    return answer.SerializeToString()


def _set(mutation: HeaderMutation, headers: Iterable[Header]) -> None:
    """Set headers, replacing any of the same name."""
    for name, value in headers:
        option = mutation.set_headers.add(append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name.decode(), value
