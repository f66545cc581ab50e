"""The grammar of request heads and chunked bodies: RFC 9112, and what it lets a recipient refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.http.chunks import ChunkedBody
from gateway.http.request_head import HeadLimits, RequestError, RequestHead, check_beginning, read_head

LIMITS = HeadLimits()


def head(lines: bytes = b"", first: bytes = b"POST /a HTTP/1.1", host: bytes = b"host: h\r\n") -> bytes:
    return first + b"\r\n" + host + lines + b"\r\n"


def read(data: bytes, limits: HeadLimits = LIMITS) -> RequestHead:
    """Read a head, with something before and after it that must make no difference."""
    return read_head(b"x\r\n" + data + b"a: b\r\n\r\n", 3, 3 + len(data), limits)


def status(call: Callable[[], object]) -> int:
    try:
        call()
    except RequestError as error:
        return error.status
    return 200


VALID: dict[str, tuple[bytes, Callable[[RequestHead], bool]]] = {
    "plain": (
        head(),
        lambda read: (read.method, read.target, read.length, read.keep_alive) == ("POST", b"/a", 0, True),
    ),
    "query": (
        head(first=b"GET /a%20b?x=%20 HTTP/1.1"),
        lambda read: read.target == b"/a%20b?x=%20",
    ),
    "names are lower case": (head(b"X-A: B\r\n"), lambda read: read.headers[1] == (b"x-a", b"B")),
    "white space around values": (head(b"a: \t b c \t\r\n"), lambda read: read.headers[1] == (b"a", b"b c")),
    "an empty value": (head(b"a:\r\n"), lambda read: read.headers[1] == (b"a", b"")),
    "bytes above 127 in a value": (head(b"a: b\xff\r\n"), lambda read: read.headers[1] == (b"a", b"b\xff")),
    "content length": (head(b"Content-Length: 12\r\n"), lambda read: read.length == 12),
    "content length with spaces": (head(b"content-length:12 \t\r\n"), lambda read: read.length == 12),
    "chunked": (head(b"Transfer-Encoding: Chunked\r\n"), lambda read: read.is_chunked),
    "close": (head(b"connection: x, Close\r\n"), lambda read: not read.keep_alive),
    "close in a second header": (head(b"connection: x\r\nconnection: close\r\n"), lambda read: not read.keep_alive),
    "HTTP/1.0": (head(first=b"GET / HTTP/1.0", host=b""), lambda read: not (read.keep_alive or read.is_http_1_1)),
    "HTTP/1.0 keeps no connection": (
        head(b"connection: keep-alive\r\n", first=b"GET / HTTP/1.0"),
        lambda read: not read.keep_alive,
    ),
    "expect": (head(b"expect: 100-Continue\r\n"), lambda read: read.expects_continue),
    "expect in HTTP/1.0": (
        head(b"expect: 100-continue\r\n", first=b"POST / HTTP/1.0"),
        lambda read: not read.expects_continue,
    ),
    "absolute form": (
        head(first=b"GET http://other:80/a?b HTTP/1.1"),
        lambda read: (read.target, read.headers) == (b"/a?b", [(b"host", b"other:80")]),
    ),
    "absolute form without a path": (head(first=b"GET HTTPS://other?b HTTP/1.1"), lambda read: read.target == b"/?b"),
    "asterisk form": (head(first=b"OPTIONS * HTTP/1.1"), lambda read: (read.method, read.target) == ("OPTIONS", b"/")),
    "host with a port": (head(host=b"Host: a.example:8080\r\n"), lambda read: True),
    "host in IPv6": (head(host=b"host: [::1]:8080\r\n"), lambda read: True),
}


@pytest.mark.parametrize("name", VALID)
def test_what_is_valid_is_read(name: str) -> None:
    data, is_right = VALID[name]
    assert is_right(read(data))


INVALID: dict[str, tuple[bytes, int]] = {
    "content length and transfer encoding": (head(b"content-length: 4\r\ntransfer-encoding: chunked\r\n"), 400),
    "transfer encoding and content length": (head(b"transfer-encoding: chunked\r\ncontent-length: 4\r\n"), 400),
    "two content lengths": (head(b"content-length: 4\r\ncontent-length: 5\r\n"), 400),
    "a list of content lengths": (head(b"content-length: 4, 4\r\n"), 400),
    "a content length with a plus": (head(b"content-length: +4\r\n"), 400),
    "an empty content length": (head(b"content-length:\r\n"), 400),
    "a content length of 20 digits": (head(b"content-length: 00000000000000000004\r\n"), 400),
    "a content length in other digits": (head("content-length: ٤\r\n".encode()), 400),
    "gzip": (head(b"transfer-encoding: gzip\r\n"), 400),
    "gzip before chunked": (head(b"transfer-encoding: gzip, chunked\r\n"), 501),
    "gzip before chunked, apart": (head(b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n"), 501),
    "gzip after chunked": (head(b"transfer-encoding: chunked, gzip\r\n"), 400),
    "chunked twice": (head(b"transfer-encoding: chunked, chunked\r\n"), 400),
    "an empty coding": (head(b"transfer-encoding: ,chunked\r\n"), 400),
    "chunkedx": (head(b"transfer-encoding: chunkedx\r\n"), 400),
    "chunked after a tab": (head(b"transfer-encoding:\tchunked\r\n"), 400),
    "chunked before a space": (head(b"transfer-encoding: chunked \r\n"), 400),
    "chunked after two spaces": (head(b"transfer-encoding:  chunked\r\n"), 400),
    "chunked after a vertical tab": (head(b"transfer-encoding: \x0bchunked\r\n"), 400),
    "chunked in HTTP/1.0": (head(b"transfer-encoding: chunked\r\n", first=b"POST / HTTP/1.0"), 400),
    "a line feed alone after the first line": (b"POST / HTTP/1.1\nhost: h\r\n\r\n", 400),
    "a line feed within a header": (head(b"a: b\nc: d\r\n"), 400),
    "a carriage return within a header": (head(b"a: b\rc: d\r\n"), 400),
    "a fold": (head(b"a: b\r\n c\r\n"), 400),
    "a space before the first header": (b"POST / HTTP/1.1\r\n host: h\r\n\r\n", 400),
    "a space before the colon": (head(b"a : b\r\n"), 400),
    "a space in a name": (head(b"a b: c\r\n"), 400),
    "a header without a colon": (head(b"abc\r\n"), 400),
    "a header without a name": (head(b": b\r\n"), 400),
    "a NUL in a value": (head(b"a: b\x00c\r\n"), 400),
    "DEL in a value": (head(b"a: b\x7fc\r\n"), 400),
    "a byte above 127 in a name": (head(b"a\xff: b\r\n"), 400),
    "a method in small letters": (head(first=b"post / HTTP/1.1"), 501),
    "CONNECT": (head(first=b"CONNECT h:80 HTTP/1.1"), 501),
    "a method that is no token": (head(first=b"PO(ST / HTTP/1.1"), 400),
    "the beginning of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\n", 505),
    "HTTP/1.2": (head(first=b"GET / HTTP/1.2"), 505),
    "HTTP/0.9 without a version": (b"GET /\r\n\r\n", 400),
    "HTTP/1.10": (head(first=b"GET / HTTP/1.10"), 400),
    "http/1.1": (head(first=b"GET / http/1.1"), 400),
    "ICE": (head(first=b"SOURCE / ICE/1.0"), 400),
    "two spaces before the target": (head(first=b"GET  / HTTP/1.1"), 400),
    "a space before the method": (head(first=b" GET / HTTP/1.1"), 400),
    "tabs in the first line": (head(first=b"GET\t/\tHTTP/1.1"), 400),
    "a control character in the target": (head(first=b"GET /\x01 HTTP/1.1"), 400),
    "a byte above 127 in the target": (head(first=b"GET /\xff HTTP/1.1"), 400),
    "a fragment": (head(first=b"GET /a#b HTTP/1.1"), 400),
    "authority form": (head(first=b"GET example.com:80 HTTP/1.1"), 400),
    "asterisk form of GET": (head(first=b"GET * HTTP/1.1"), 400),
    "absolute form with a user": (head(first=b"GET http://u:p@h/ HTTP/1.1"), 400),
    "absolute form without a host": (head(first=b"GET http:///a HTTP/1.1"), 400),
    "absolute form with only a port": (head(first=b"GET http://:80/a HTTP/1.1"), 400),
    "no host": (head(host=b""), 400),
    "no host in absolute form": (head(first=b"GET http://h/ HTTP/1.1", host=b""), 400),
    "two hosts": (head(b"host: h\r\n"), 400),
    "a host with a path": (head(host=b"host: h/a\r\n"), 400),
    "a host with a port of letters": (head(host=b"host: h:a\r\n"), 400),
    "two authorizations": (head(b"authorization: Bearer a\r\nAuthorization: Bearer b\r\n"), 400),
    "two keys": (head(b"x-api-key: a\r\nX-Api-Key: b\r\n"), 400),
    "a long target": (head(first=b"GET /" + b"x" * LIMITS.target_bytes + b" HTTP/1.1"), 414),
    "a large header": (head(b"a: " + b"x" * LIMITS.headers_bytes + b"\r\n"), 431),
    "large headers": (head(b"a: %b\r\n" % (b"x" * 1000) * 66), 431),
    "many headers": (head(b"a: b\r\n" * LIMITS.headers), 431),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_invalid_is_refused(name: str) -> None:
    data, expected = INVALID[name]
    assert status(lambda: read(data)) == expected


def test_heads_at_their_bounds_are_read() -> None:
    target = b"/" + b"x" * (LIMITS.target_bytes - 1)
    assert read(head(first=b"GET %b HTTP/1.1" % target)).target == target
    assert len(read(head(b"a: b\r\n" * (LIMITS.headers - 1))).headers) == LIMITS.headers
    large = b"a: " + b"x" * (LIMITS.headers_bytes - len(b"host: h\r\na: \r\n")) + b"\r\n"
    assert len(read(head(large)).headers) == 2


def beginnings(data: bytes, sizes: list[int]) -> int:
    """Return the status of the first beginning of a head that is refused; 200 if none is."""
    checked = received = 0
    for size in sizes:
        try:
            checked = check_beginning(data[:size], checked, received, LIMITS)
        except RequestError as error:
            return error.status
        received = size
    return 200


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64])
def test_no_beginning_of_a_valid_head_is_refused(step: int) -> None:
    for data, _ in VALID.values():
        assert beginnings(data, list(range(1, len(data) - 1, step))) == 200, data


@pytest.mark.parametrize("name", INVALID)
def test_the_beginning_of_a_head_is_refused_for_the_same_reason_or_not_at_all(name: str) -> None:
    data, expected = INVALID[name]
    if len(data) < 2000:
        assert beginnings(data, list(range(1, len(data) - 1))) in {200, expected}
    assert beginnings(data, list(range(50, len(data) - 1, 50))) in {200, expected}


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"GET / HTTP/1.1\nhost: h\n\n",
        b"GET / HTTP/1.1\r\nhost: h\n\n",
        b"GET / HTTP/1.1\r\nhost: h\r\r",
        b"x" * 40,
        b"GET / HTTP/1.1\r\n\x00",
        b"GET / HTTP/1.1\r\nno colon\r\na",
    ],
)
@pytest.mark.parametrize("step", [1, 100])
def test_what_cannot_become_a_request_is_refused_before_its_end(data: bytes, step: int) -> None:
    assert beginnings(data, [*range(1, len(data), step), len(data)]) == 400


def test_large_heads_are_refused_before_their_end() -> None:
    assert beginnings(b"GET /" + b"x" * 20_000, [100, 20_000]) == 414
    for lines in (b"a: " + b"x" * 70_000, b"a: b\r\n" * 101):
        data = b"GET / HTTP/1.1\r\n" + lines
        assert beginnings(data, [100, len(data)]) == 431


def read_chunks(data: bytes, step: int, limit_bytes: int = 1000) -> tuple[bytes, bytes | None]:
    """Return the body, and what follows it; None if it is not complete."""
    body, at, given = ChunkedBody(HeadLimits(headers_bytes=1000, headers=10), limit_bytes), 0, 0
    while given < len(data) and not body.is_complete:
        given = min(given + step, len(data))
        at = body.read(data[:given], at)
    return bytes(body.data), data[at:] if body.is_complete else None


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "data",
    [
        b"4\r\nabcd\r\n0\r\n\r\n",
        b"1\r\na\r\n3\r\nbcd\r\n0\r\n\r\n",
        b'4;a=b;c="d"\r\nabcd\r\n0;x\r\n\r\n',
        b"4;\ta\r\nabcd\r\n0\r\n\r\n",
        b"0004\r\nabcd\r\n000\r\n\r\n",
        b"4\r\nabcd\r\n0\r\na: b\r\nc: d\r\n\r\n",
    ],
)
def test_chunks_are_read_in_any_pieces(data: bytes, step: int) -> None:
    body, rest = read_chunks(data + b"GET /", step)
    assert body == b"abcd"
    assert rest is not None
    assert b"GET /".startswith(rest)


def test_chunks_without_an_end_are_not_complete() -> None:
    data = b"4\r\nabcd\r\n0\r\na: b\r\n\r\n"
    for size in range(len(data)):
        assert read_chunks(data[:size], 5)[1] is None


INVALID_CHUNKS: dict[str, tuple[bytes, int]] = {
    "0x": (b"0x4\r\nabcd\r\n", 400),
    "no size": (b"\r\nabcd\r\n", 400),
    "a space before the size": (b" 4\r\nabcd\r\n", 400),
    "a space after the size": (b"4 \r\nabcd\r\n", 400),
    "17 digits": (b"00000000000000004\r\nabcd\r\n", 400),
    "a huge size": (b"ffffffffffffffff\r\nabcd\r\n", 413),
    "a size above the limit": (b"3e9\r\n", 413),
    "a sum above the limit": (b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\n", 413),
    "a line feed after the size": (b"4\nabcd\r\n", 400),
    "a carriage return in an extension": (b"4;a\rb\r\nabcd\r\n", 400),
    "a long extension": (b"4;" + b"a" * 300, 400),
    "a line feed after the chunk": (b"4\r\nabcd\n0\r\n\r\n", 400),
    "no line end after the chunk": (b"4\r\nabcd0\r\n\r\n", 400),
    "a line feed at the end": (b"0\r\n\n\r\n\r\n", 400),
    "a trailer that is none": (b"0\r\nabc\r\n\r\n", 400),
    "a trailer with a control character": (b"0\r\na: b\x01\r\n\r\n", 400),
    "a fold in a trailer": (b"0\r\na: b\r\n c\r\n\r\n", 400),
    "framing in a trailer": (b"0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "many trailers": (b"0\r\n" + b"a: b\r\n" * 11 + b"\r\n", 431),
    "large trailers": (b"0\r\na: " + b"x" * 1001, 431),
    "more framing than body": (b"1;%b\r\nx\r\n" % (b"e" * 200) * 10, 400),
}


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("name", INVALID_CHUNKS)
def test_invalid_chunks_are_refused(name: str, step: int) -> None:
    data, expected = INVALID_CHUNKS[name]
    assert status(lambda: read_chunks(data, step)) == expected
