"""Header blocks that are decoded once say what they would say if they were decoded again."""

from __future__ import annotations

import pytest
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.picker.grpc.frames import Http2Error
from gateway.picker.grpc.heads import HeadReader
from tests.gateway.picker.grpc.peer import REQUEST

FIELDS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "x-request-id"]), st.sampled_from(["1", "2", "3" * 900])), max_size=4
)
PATHS = st.sampled_from(["/one", "/two", "/three"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PATHS, FIELDS, st.sampled_from([0, 64, 4096])), max_size=30))
def test_the_heads_are_those_that_were_sent(sent: list[tuple[str, list[tuple[str, str]], int]]) -> None:
    encoder, reader = Encoder(), HeadReader()
    for path, fields, size in sent:
        if encoder.header_table_size != size:
            encoder.header_table_size = size
        head = reader.read(encoder.encode([(":path", path), *REQUEST[:2], *REQUEST[3:], *fields]))
        assert head.path == path.encode()
        assert head.is_request
        assert head.is_grpc


def test_a_repeated_block_is_decoded_once() -> None:
    encoder, reader = Encoder(), HeadReader()
    first, *later = (reader.read(encoder.encode(REQUEST)) for _ in range(4))
    assert later[0] is later[1] is later[2]
    assert first.path == later[0].path


def test_content_types() -> None:
    def is_grpc(value: str) -> bool:
        fields = [*REQUEST[:-1], ("content-type", value)]
        return HeadReader().read(Encoder().encode(fields)).is_grpc

    assert all(is_grpc(f"application/grpc{rest}") for rest in ("", "+proto", ";x=y"))
    assert not any(is_grpc(value) for value in ("application/grpc-web", "application/json", ""))


def test_a_repeated_block_after_a_change_of_the_table_is_decoded_again() -> None:
    reader = HeadReader()
    latest = Encoder().encode(REQUEST[:2]) + b"\xbe"  # the latest entry of the table
    for path in (b"/one", b"/two"):
        reader.read(b"\x44%c%b" % (len(path), path))  # which remembers it
        assert [reader.read(latest).path for _ in range(3)] == [path] * 3


def test_what_cannot_be_decoded_is_told_without_the_words_of_the_library() -> None:
    with pytest.raises(Http2Error) as raised:  # it shows addresses in memory
        HeadReader().read(b"\xff" * 12)
    assert raised.value.text == "the header block cannot be decoded"
