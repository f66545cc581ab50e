"""Requests that get an error in place of an endpoint."""

from __future__ import annotations

import json

import pytest

from .data_plane import StreamEndedError
from .requirement import Source, must, should
from .target import SHED_AFTER, Target, destinations


@must(Source.DESTINATION, "Without a ready endpoint the answer is 503.")
def test_no_endpoint(picker: Target) -> None:
    if picker.empty is None:
        pytest.skip("give --empty-target or --empty-model")
    address, model = picker.empty
    answer = picker.post(picker.chat(model=model), address=address)
    assert answer.immediate == 503, f"expected 503, got {answer.summary()}"


@must(Source.DESTINATION, "A request that is dropped, to shed load or for a limit, gets 429.")
def test_dropped(picker: Target) -> None:
    if not picker.shed_headers:
        pytest.skip("give --shed-header")
    for _ in range(SHED_AFTER):
        answer = picker.post(headers=picker.shed_headers)
        if answer.immediate:
            assert answer.immediate == 429, f"expected 429, got {answer.summary()}"
            return
    pytest.fail(f"none of {SHED_AFTER} requests was dropped")


@should(Source.USERS, "A body that is no JSON gives 400.")
@pytest.mark.parametrize("body", [b"no healthy upstream", b'{"model": "cut off', b"\xff\xfe{}", b""])
def test_invalid_json(picker: Target, body: bytes) -> None:
    answer = picker.post(body)
    assert answer.immediate == 400, f"expected 400 for {body!r}, got {answer.summary()}"


@should(Source.USERS, "A body that is JSON but no object gives an error of the client, 4xx.")
@pytest.mark.parametrize("body", [b"[]", b'"text"', b"null", b"1"])
def test_no_object(picker: Target, body: bytes) -> None:
    answer = picker.post(body)
    assert 400 <= answer.immediate < 500, f"expected 4xx for {body!r}, got {answer.summary()}"


@should(Source.USERS, "A request without a model, or for an unknown one, gives 4xx or is passed on to the pool.")
@pytest.mark.parametrize("body", [b'{"messages": []}', b'{"model": "no-such-model", "messages": []}'])
def test_unknown_model(picker: Target, body: bytes) -> None:
    answer = picker.post(body)
    if answer.immediate:
        assert 400 <= answer.immediate < 500, f"expected 4xx, got {answer.summary()}"
    else:
        destinations(answer)


@should(Source.USERS, "A body beyond the picker's limit gets an error, not silence, and the picker goes on serving.")
def test_too_large(picker: Target) -> None:
    if not picker.max_body_bytes:
        pytest.skip("give --max-body-bytes")
    piece = b" " * 65536
    with picker.stream() as stream:
        picker.begin(stream)
        for _ in range(picker.max_body_bytes // len(piece) + 1):
            stream.send_body(piece, end=False)
        stream.send_body(picker.chat())
        try:
            refused = stream.request().immediate
        except StreamEndedError as end:
            refused = 0 if end.code.name == "OK" else 413  # for the client an ended stream is an error as well
    assert 400 <= refused < 500, f"expected 4xx or an ended stream, got {refused}"
    picker.assert_serves()


@should(Source.EXT_PROC, "Messages out of order get an error or the end of the stream.")
@pytest.mark.parametrize("first", ["body", "headers twice"])
def test_out_of_order(picker: Target, first: str) -> None:
    with picker.stream() as stream:
        if first == "headers twice":
            picker.begin(stream)
            picker.begin(stream)
        stream.send_body(json.dumps({"model": picker.model, "messages": []}).encode())
        try:
            kind = stream.receive().WhichOneof("response")
        except StreamEndedError:
            pass
        else:
            assert kind == "immediate_response", f"expected an error, got {kind}"
    picker.assert_serves()
