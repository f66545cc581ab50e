"""Requests that two parsers can read differently, each with a second request where one of them would find it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.attacks.upstream import SMUGGLED

_OUTER = b'{"model": "m", "messages": [{"role": "user", "content": "outer"}]}'
_INNER = b'{"model": "m", "messages": [{"role": "user", "content": "%b"}]}' % SMUGGLED.encode()


@dataclass(frozen=True, slots=True)
class Case:
    """One ambiguous request.

    Parameters
    ----------
    lines
        Its header lines; `{all}` is the length of `body` with the inner request, `{outer}` that before it.
    body
        What follows the head; `{inner}` is the inner request, `{size}` its length in hexadecimal digits.
    begin
        The request line, with `{path}`.
    """

    name: str
    lines: str
    body: str
    begin: str = "POST {path} HTTP/1.1"

    def request(self, path: bytes, key: bytes) -> bytes:
        """Return the bytes."""
        head = b"POST %b HTTP/1.1\r\nhost: a\r\n%bcontent-type: application/json\r\n" % (path, key)
        inner = head + b"content-length: %d\r\n\r\n%b" % (len(_INNER), _INNER)
        before, _, _ = self.body.partition("{inner}")
        fields = {"size": f"{len(inner):x}", "outer_json": _OUTER.decode(), "outer_size": f"{len(_OUTER):x}"}
        text = self.body.format(inner=inner.decode(), **fields)
        lines = self.lines.format(all=len(text), outer=len(before.format(**fields)))
        begin = self.begin.format(path=path.decode())
        return f"{begin}\r\nhost: a\r\n{key.decode()}content-type: application/json\r\n{lines}\r\n{text}".encode()


_CHUNKED = "{outer_size}\r\n{outer_json}\r\n0\r\n\r\n{inner}"
_PLAIN = "{outer_json}{inner}"
CASES = (
    Case("both lengths", "content-length: {all}\r\ntransfer-encoding: chunked\r\n", _CHUNKED),
    Case(
        "both lengths, inside a chunk",
        "content-length: {outer}\r\ntransfer-encoding: chunked\r\n",
        "{size}\r\n{inner}\r\n0\r\n\r\n",
    ),
    Case("two lengths", "content-length: {outer}\r\ncontent-length: {all}\r\n", _PLAIN),
    Case("two lengths in one line", "content-length: {outer}, {all}\r\n", _PLAIN),
    Case(
        "two codings",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\ncontent-length: {all}\r\n",
        _CHUNKED,
    ),
    Case("unknown coding", "transfer-encoding: xchunked\r\ncontent-length: {all}\r\n", _CHUNKED),
    Case("coding with a tab", "transfer-encoding:\tchunked\r\ncontent-length: {all}\r\n", _CHUNKED),
    Case("space before the colon", "transfer-encoding : chunked\r\ncontent-length: {all}\r\n", _CHUNKED),
    Case("folded line", "transfer-encoding:\r\n chunked\r\ncontent-length: {all}\r\n", _CHUNKED),
    Case("bare line feed", "x: y\ntransfer-encoding: chunked\r\ncontent-length: {all}\r\n", _CHUNKED),
    Case("bare carriage return", "x: y\rtransfer-encoding: chunked\r\ncontent-length: {all}\r\n", _CHUNKED),
    Case("zero byte", "transfer-encoding\0: chunked\r\ncontent-length: {all}\r\n", _CHUNKED),
    Case("length with a sign", "content-length: +{outer}\r\n", _PLAIN),
    Case("chunk size too large", "transfer-encoding: chunked\r\n", "10000000000000000\r\n{inner}"),
    Case("chunk without its end", "transfer-encoding: chunked\r\n", "3\r\nabcXX0\r\n\r\n{inner}"),
    Case("chunk size with 0x", "transfer-encoding: chunked\r\n", "0x3\r\nabc\r\n0\r\n\r\n{inner}"),
    Case(
        "upgrade to h2c",
        "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
        "content-length: {all}\r\n",
        _PLAIN,
    ),
    Case("absolute form", "content-length: {all}\r\n", _PLAIN, "POST http://elsewhere.example{path} HTTP/1.1"),
    Case(
        "HTTP/1.0 with chunks",
        "transfer-encoding: chunked\r\ncontent-length: {all}\r\n",
        _CHUNKED,
        "POST {path} HTTP/1.0",
    ),
)
