"""What is written field by field is what protobuf writes."""

from __future__ import annotations

import pytest

from gateway.picker import messages
from gateway.picker.ext_proc_pb2 import HeaderMutation, HeaderValueOption, ProcessingResponse

HEADERS = [(b"x-request-id", b"1"), (b":path", b"/" + b"p" * 300), (b"x-empty", b"")]


def put(mutation: HeaderMutation, headers: list[tuple[bytes, bytes]]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name.decode(), value


@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 16_400, messages.PIECE_BYTES, messages.PIECE_BYTES + 1, 220_000])
@pytest.mark.parametrize("is_last", [True, False])
def test_bodies(size: int, is_last: bool) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    pieces = [ProcessingResponse.FromString(each) for each in messages.request_body(body[:size], is_last=is_last)]
    streamed = [each.request_body.response.body_mutation.streamed_response for each in pieces]
    assert b"".join(each.body for each in streamed) == body[:size]
    assert max(len(each.body) for each in streamed) <= messages.PIECE_BYTES
    assert [each.end_of_stream for each in streamed] == [*[False] * (len(streamed) - 1), is_last]
    answer = ProcessingResponse()
    expected = answer.response_body.response.body_mutation.streamed_response
    expected.body, expected.end_of_stream = body[:size], is_last
    sent = messages.response_body(body[:size], is_streamed=True, is_last=is_last)
    assert ProcessingResponse.FromString(sent) == answer


def test_headers_and_metadata() -> None:
    answer = ProcessingResponse()
    mutation = answer.request_headers.response.header_mutation
    put(mutation, [(messages.DESTINATION.encode(), b"10.0.0.1:80,10.0.0.2:80"), *HEADERS])
    mutation.remove_headers.extend(["a", "b"])
    fields = answer.dynamic_metadata.fields[messages.NAMESPACE].struct_value.fields
    fields[messages.DESTINATION].string_value = "10.0.0.1:80,10.0.0.2:80"
    fields[messages.REQUEST].string_value = "name"
    sent = messages.forward("10.0.0.1:80,10.0.0.2:80", "name", HEADERS, [b"a", b"b"])
    assert ProcessingResponse.FromString(sent) == answer

    answer = ProcessingResponse()
    put(answer.response_headers.response.header_mutation, HEADERS)
    assert ProcessingResponse.FromString(messages.response_headers(HEADERS)) == answer


def test_an_immediate_answer() -> None:
    answer = ProcessingResponse()
    answer.immediate_response.status.code = 429
    answer.immediate_response.body = b"{}"
    put(answer.immediate_response.headers, HEADERS)
    assert ProcessingResponse.FromString(messages.immediate(429, HEADERS, b"{}")) == answer


@pytest.mark.parametrize("kind", ["request_trailers", "response_trailers", "response_body"])
def test_answers_that_change_nothing(kind: str) -> None:
    sent = {
        "request_trailers": messages.request_trailers(),
        "response_trailers": messages.response_trailers(),
        "response_body": messages.response_body(b"a", is_streamed=False, is_last=True),
    }
    answer = ProcessingResponse()
    getattr(answer, kind).SetInParent()
    assert ProcessingResponse.FromString(sent[kind]) == answer
