"""The reader of requests: what it says of bytes, however they are cut."""

from __future__ import annotations

import pytest

from gateway.http.reader import BEGINNING, HEAD, NOTHING, PART, WHOLE, RequestReader
from gateway.http.request_head import HeadLimits, RequestError

LIMITS = HeadLimits(target_bytes=100, headers_bytes=1000, headers=10)
POST = b"POST /a HTTP/1.1\r\nhost: h\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


def reader() -> RequestReader:
    return RequestReader(LIMITS, 1000)


def events(reader: RequestReader, *pieces: bytes) -> list[int]:
    """Feed pieces, and return what the reader says of them."""
    said = []
    for piece in pieces:
        reader.feed(piece)
        while (event := reader.next()) != NOTHING:
            said.append(event)
            if event == HEAD:
                reader.learn()
    return said


def test_a_request_is_a_head_and_a_body() -> None:
    one = reader()
    assert events(one, POST + b"content-length: 2\r\n\r\nok") == [HEAD, WHOLE]
    assert (one.head.method, one.head.target, one.body, one.held_bytes()) == ("POST", b"/a", b"ok", 0)
    assert events(one, b"\r\n\r\nGET /b HTTP/1.1\r\nhost: h\r\n\r\n") == [HEAD, WHOLE]
    assert (one.head.target, one.body) == (b"/b", b"")


def test_a_known_head_shares_what_was_parsed() -> None:
    one = reader()
    events(one, POST + b"content-length: 2\r\n\r\nok")
    head = one.head
    assert events(one, POST + b"content-length: 11\r\n\r\nhello world") == [HEAD, WHOLE]
    assert (one.head is head, one.is_known, one.body) == (True, True, b"hello world")
    one.forget(1000)
    events(one, POST + b"content-length: 0\r\n\r\n")
    assert (one.head is head, one.is_known) == (False, False)


def test_what_comes_behind_a_request_waits() -> None:
    one = reader()
    one.feed(POST + b"content-length: 2\r\n\r\nokGET /b HT")
    assert [one.next(), one.next()] == [HEAD, WHOLE]
    assert one.waiting_bytes() == len(b"GET /b HT")
    assert [one.next(), one.next()] == [BEGINNING, NOTHING]


def test_a_head_begins_after_an_empty_line_that_came_in_parts() -> None:
    assert events(reader(), b"\r", b"\nG") == [BEGINNING, BEGINNING]
    with pytest.raises(RequestError):
        events(reader(), b"\r", b"\n\0")


@pytest.mark.parametrize(
    ("sent", "status", "is_body"),
    [
        (b"\r\n" * 5, 400, False),
        (b"NOT HTTP AT ALL\r\n\r\n", 400, False),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 1001, 431, False),
        (POST + b"content-length: 1001\r\n\r\n", 413, True),
        (CHUNKED + b"3e9\r\n", 413, True),
        (CHUNKED + b"2\r\nabc\r\n", 400, True),
    ],
)
def test_what_is_refused_is_refused_as_soon_as_it_can_be_told(sent: bytes, status: int, is_body: bool) -> None:
    one = reader()
    with pytest.raises(RequestError) as refused:
        events(one, sent)
    assert (refused.value.status, one.is_reading_body) == (status, is_body)
    one.drop()
    assert one.held_bytes() == 0


@pytest.mark.parametrize(
    "sent", [POST + b"content-length: 5\r\n\r\nhello", CHUNKED + b"2\r\nhe\r\n3;x=1\r\nllo\r\n0\r\nt: 1\r\n\r\n"]
)
def test_bytes_that_come_one_by_one_are_the_same_request(sent: bytes) -> None:
    one = reader()
    said = events(one, *[sent[at : at + 1] for at in range(len(sent))])
    assert said[:2] == [BEGINNING, HEAD]
    assert said[-1] == WHOLE
    assert {*said[2:-1]} == {PART}, "the head begins once, and is complete once"
    assert (one.body, one.held_bytes(), one.is_reading_body) == (b"hello", 0, False)
