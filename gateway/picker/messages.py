"""The messages of ext_proc that the picker sends, and what it reads of those that it gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValueOption, Metadata
from envoy.service.ext_proc.v3.external_processor_pb2 import HeaderMutation, ProcessingResponse

from gateway.http.headers import Header

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
REQUEST: Final = "x-gateway-request"
SERVED: Final = "x-gateway-destination-endpoint-served"
NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
PIECE_BYTES: Final = 60 * 1024
"""Longest piece of a body: some proxies take no more than 64 KiB in one message."""

_OVERWRITE: Final = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


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


def forward(destinations: str, request: str, headers: Iterable[Header], removed: Iterable[str]) -> ProcessingResponse:
    """Return the answer to a request's headers: where it goes, and which headers it has there.

    Parameters
    ----------
    request
        A name by which the picker knows the request again when it is told of the answer.
    """
    answer = ProcessingResponse()
    mutation = answer.request_headers.response.header_mutation
    _set(mutation, [(DESTINATION.encode(), destinations.encode()), *headers])
    mutation.remove_headers.extend(removed)
    fields = answer.dynamic_metadata.fields[NAMESPACE].struct_value.fields
    fields[DESTINATION].string_value, fields[REQUEST].string_value = destinations, request
    return answer


def request_body(body: bytes, *, is_last: bool) -> Iterator[ProcessingResponse]:
    """Yield the pieces of a request's body for the backend; an empty body is one empty piece."""
    for begin in range(0, len(body) or 1, PIECE_BYTES):
        answer = ProcessingResponse()
        piece = answer.request_body.response.body_mutation.streamed_response
        piece.body = body[begin : begin + PIECE_BYTES]
        piece.end_of_stream = is_last and begin + PIECE_BYTES >= len(body)
        yield answer


def request_trailers() -> ProcessingResponse:
    """Return the answer to a request's trailers, which stay."""
    answer = ProcessingResponse()
    answer.request_trailers.SetInParent()
    return answer


def response_headers(headers: Iterable[Header]) -> ProcessingResponse:
    """Return the answer to the headers of an answer."""
    answer = ProcessingResponse()
    answer.response_headers.SetInParent()
    _set(answer.response_headers.response.header_mutation, headers)
    return answer


def response_body(body: bytes, *, is_streamed: bool, is_last: bool) -> ProcessingResponse:
    """Return the answer to a piece of an answer's body, which is passed on.

    Parameters
    ----------
    is_streamed
        Whether the proxy passes on what it gets back (full duplex); else it has kept the piece.
    """
    answer = ProcessingResponse()
    if is_streamed:
        piece = answer.response_body.response.body_mutation.streamed_response
        piece.body, piece.end_of_stream = body, is_last
    else:
        answer.response_body.SetInParent()
    return answer


def response_trailers() -> ProcessingResponse:
    """Return the answer to an answer's trailers, which stay."""
    answer = ProcessingResponse()
    answer.response_trailers.SetInParent()
    return answer


def immediate(status: int, headers: Iterable[Header], body: bytes) -> ProcessingResponse:
    """Return an answer that the client gets from the proxy, in place of a backend's."""
    answer = ProcessingResponse()
    response = answer.immediate_response
    response.status.code = status
    _set(response.headers, headers)
    response.body = body
    return answer


def _text_of(metadata: Metadata, name: str) -> str:
    values = metadata.filter_metadata
    if NAMESPACE not in values or name not in values[NAMESPACE].fields:
        return ""
    text: str = values[NAMESPACE].fields[name].string_value
    return text


def _set(mutation: HeaderMutation, headers: Iterable[Header]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name.decode("latin-1"), value
