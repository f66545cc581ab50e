"""Parses the head of an HTTP/1.1 request strictly by RFC 9112.

It refuses what the RFC lets a recipient repair: parties that repair differently disagree on where a request ends,
which lets one client write the beginning of another's request (request smuggling).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from gateway.dialects.errors import too_large

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_REQUEST_LINE: Final = re.compile(rb"(" + _TOKEN + rb"++) ([!\"$-~]++) HTTP/(\d\.\d)\r\n")
_REQUEST_LINE_BEGINS: Final = re.compile(_TOKEN + rb"{1,32}(?: [!\"$-~]*+(?: [HTTP/0-9.]{0,8}\r?)?)?")
_FIELD_LINES: Final = re.compile(rb"(?:" + _TOKEN + rb"++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+")
_UNFIT: Final = re.compile(rb"[\x00-\x08\x0a-\x0c\x0e-\x1f\x7f]|\r(?!\Z)")
"""Bytes that no line may contain before its end."""
_LONGEST_METHOD_BYTES = 32
_HOST = rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=%]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?"
_HOST_VALUE: Final = re.compile(_HOST)
_ABSOLUTE_FORM: Final = re.compile(rb"https?://(" + _HOST + rb")(/[^?]*)?(\?.*)?", re.IGNORECASE)
_LENGTH: Final = re.compile(rb"[0-9]{1,19}")
_CHUNKED_LINE: Final = re.compile(rb"\r\ntransfer-encoding: ?chunked\r\n", re.IGNORECASE)
_METHODS: Final = frozenset({b"DELETE", b"GET", b"HEAD", b"OPTIONS", b"PATCH", b"POST", b"PUT"})
_ONCE: Final = frozenset({b"authorization", b"content-length", b"content-type", b"host", b"x-api-key"})
"""Headers that must not repeat, since it would be unclear which one counts."""
_KNOWN: Final = _ONCE | {b"connection", b"expect", b"transfer-encoding"}


class RequestError(Exception):
    """A request that the server does not accept."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status  # HTTP status of the answer
        self.reason = reason  # what is wrong, for the client; quotes nothing of the request


def body_too_large(limit_bytes: int) -> RequestError:
    """Return the error for a body above the limit."""
    return RequestError(413, too_large(limit_bytes).message)


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Limits on the head of a request."""

    target_bytes: int = 8 * 1024  # size of the request target
    # headers_bytes, headers: total size and number of headers. They apply to the trailers of a chunked body too.
    headers_bytes: int = 64 * 1024
    headers: int = 100


class RequestHead:
    """The head of a request."""

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        length: int = 0,
        is_chunked: bool = False,
        expects_continue: bool = False,
        is_http_1_1: bool = True,
        keep_alive: bool = False,
    ) -> None:
        self.method = method
        self.target = target  # path and query as received
        self.headers = headers  # headers in order, with lower-case names
        self.length = length  # size of the body in bytes, if the body is not chunked
        self.is_chunked = is_chunked  # whether the body comes in chunks
        self.expects_continue = expects_continue  # whether the client waits for `100 Continue`
        # False for HTTP/1.0, which has no chunks: closing the connection ends the answer.
        self.is_http_1_1 = is_http_1_1
        self.keep_alive = keep_alive  # whether another request may follow
        # The service's notes on the head, which it finds again on each request with the same head.
        self.notes: Any = None

    def keep(self, notes: Any) -> None:
        """Set the service's notes on the head."""
        self.notes = notes


def read_head(data: bytes, begins: int, end: int, limits: HeadLimits) -> RequestHead:
    r"""Return the request head in `data[begins:end]`, which ends with an empty line.

    Examples
    --------
    >>> data = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n"
    >>> head = read_head(data, 0, len(data), HeadLimits())
    >>> head.method, head.target, head.headers, head.length
    ('POST', b'/v1/completions?x=1', [(b'host', b'h'), (b'content-length', b'2')], 2)
    """
    line, lines_begin = _request_line(data, begins, limits)
    _check_size(data, lines_begin, end - 2, limits)
    _check_field_lines(data, lines_begin, end - 2)
    headers, known = _fields(data[lines_begin : end - 4]) if end - 4 > lines_begin else ([], {})
    if _HOST_VALUE.fullmatch(known.get(b"host", b"")) is None:
        raise RequestError(400, "The header host is not a host.")
    if _LENGTH.fullmatch(known.get(b"content-length", b"0")) is None:
        raise RequestError(400, "The content length is not a number.")
    is_http_1_1 = line[2] == b"1.1"
    if is_http_1_1 and b"host" not in known:
        raise RequestError(400, "The request has no header host.")
    target, host = _target(line[0], line[1])
    if host:  # the target's host wins (RFC 9112, section 3.2.2)
        headers = [(b"host", host), *[header for header in headers if header[0] != b"host"]]
    is_chunked = b"transfer-encoding" in known
    if is_chunked:
        if not is_http_1_1 or b"content-length" in known:
            raise RequestError(400, "A transfer encoding goes neither with a content length nor with HTTP/1.0.")
        _check_coding(known[b"transfer-encoding"], data[lines_begin - 2 : end])
    return RequestHead(
        line[0].decode("ascii"),
        target,
        headers,
        length=int(known.get(b"content-length", b"0")),
        is_chunked=is_chunked,
        expects_continue=is_http_1_1 and known.get(b"expect", b"").lower() == b"100-continue",
        is_http_1_1=is_http_1_1,
        keep_alive=is_http_1_1 and b"close" not in _options(known.get(b"connection", b"")),
    )


def check_beginning(data: bytes, checked: int, received: int, limits: HeadLimits) -> int:
    """Check an incomplete head, to refuse what it can now; return the offset up to which its lines are checked."""
    stop = data.rfind(b"\r\n", checked) + 2
    if stop < 2:
        stop = checked
    if not stop:
        if len(data) > limits.target_bytes + _LONGEST_METHOD_BYTES + len(" HTTP/1.1\r"):
            raise _target_too_long(limits)
        if data != b"\r" and _REQUEST_LINE_BEGINS.fullmatch(data) is None:
            raise _no_request_line()
        return 0
    _, lines_begin = _request_line(data, 0, limits)
    _check_size(data, lines_begin, len(data), limits)
    _check_field_lines(data, max(checked, lines_begin), stop)
    if _UNFIT.search(data, max(stop, received - 1)) is not None:
        raise RequestError(400, "A header has a character that is not allowed there.")
    return stop


def check_trailers(data: bytes, begins: int, end: int, limits: HeadLimits) -> None:
    """Check the header lines `data[begins:end]` after the last chunk of a body; raises as `read_head` does."""
    _check_size(data, begins, end, limits)
    _check_field_lines(data, begins, end)
    _, known = _fields(data[begins : end - 2])
    if b"content-length" in known or b"transfer-encoding" in known:
        raise RequestError(400, "A header about the framing of the body comes after the body.")


def _request_line(data: bytes, begins: int, limits: HeadLimits) -> tuple[tuple[bytes, bytes, bytes], int]:
    """Return method, target and version, and the offset after the line."""
    match = _REQUEST_LINE.match(data, begins)
    if match is None:
        if data.find(b"\r\n", begins, begins + limits.target_bytes) < 0:
            raise _target_too_long(limits)
        raise _no_request_line()
    method, target, version = match.group(1, 2, 3)
    if len(target) > limits.target_bytes:
        raise _target_too_long(limits)
    if version not in {b"1.1", b"1.0"}:
        raise RequestError(505, "This server speaks HTTP/1.1.")
    if method not in _METHODS:
        raise RequestError(501, "This server does not implement the method of the request.")
    return (method, target, version), match.end()


def _target_too_long(limits: HeadLimits) -> RequestError:
    return RequestError(414, f"The request target is longer than {limits.target_bytes} bytes.")


def _no_request_line() -> RequestError:
    return RequestError(400, "The request does not begin with a line like 'GET /path HTTP/1.1'.")


def _check_size(data: bytes, begins: int, end: int, limits: HeadLimits) -> None:
    if end - begins > limits.headers_bytes:
        raise RequestError(431, f"The headers are larger than {limits.headers_bytes} bytes.")
    if data.count(b"\r\n", begins, end) > limits.headers:
        raise RequestError(431, f"The request has more than {limits.headers} headers.")


def _check_field_lines(data: bytes, begins: int, end: int) -> None:
    match = _FIELD_LINES.match(data, begins, end)
    if match is None or match.end() != end:
        raise RequestError(
            400, "A header is not of the form 'name: value', or has a character that is not allowed there."
        )


def _fields(lines: bytes) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
    """Return all headers, and those that concern the server by name, joined with commas if they repeat."""
    headers: list[tuple[bytes, bytes]] = []
    known: dict[bytes, bytes] = {}
    for line in lines.split(b"\r\n"):
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        headers.append((name, value))
        if name in _KNOWN:
            if name not in known:
                known[name] = value
            elif name in _ONCE:
                raise RequestError(400, f"The request has more than one header {name.decode()}.")
            else:
                known[name] += b"," + value
    return headers, known


def _options(value: bytes) -> list[bytes]:
    return [option.strip(b" \t") for option in value.lower().split(b",")]


def _target(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Return path and query, and the host of an absolute URL, which clients send to a proxy."""
    if target.startswith(b"/"):
        return target, b""
    if target == b"*" and method == b"OPTIONS":
        return b"/", b""  # the server as a whole
    match = _ABSOLUTE_FORM.fullmatch(target)
    if match is None or not match[1] or match[1].startswith(b":"):
        raise RequestError(400, "The request target is neither a path nor an http URL.")
    return (match[2] or b"/") + (match[3] or b""), match[1]


def _check_coding(value: bytes, lines: bytes) -> None:
    """Check that the only transfer coding is chunked, plainly written: RFC 9112, sections 6.1 and 6.3."""
    codings = _options(value)
    if codings == [b"chunked"] and _CHUNKED_LINE.search(lines) is not None:
        return
    if len(codings) > 1 and codings[-1] == b"chunked" and codings.count(b"chunked") == 1 and all(codings):
        raise RequestError(501, "This server knows no transfer encoding besides chunked.")
    raise RequestError(400, "The transfer encoding is not exactly 'chunked'.")
