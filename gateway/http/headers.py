"""The headers that the gateway forwards, in both directions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import urlsplit, urlunsplit

Header = tuple[bytes, bytes]

# They belong to one connection, not to the message: RFC 9110, section 7.6.1.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
ENGINE_PRIORITY: Final = b"x-vllm-priority"
"""vLLM reads it as `priority`, which the key bounds: it counts in the queue and is not forwarded."""
# What an engine compresses could neither be checked nor counted.
_NOT_TO_BACKEND = _HOP_BY_HOP | {
    b"accept-encoding",
    b"content-length",
    b"expect",
    b"host",
    b"x-request-id",
    ENGINE_PRIORITY,
}
_LOCATIONS = frozenset({b"location", b"content-location"})  # forwarded as paths of the gateway: see `relative_location`
# The HTTP server writes its own date, and the exchange its own request id.
_NOT_TO_CLIENT = _HOP_BY_HOP | _LOCATIONS | {b"date", b"request-id", b"x-request-id"}
_API_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_GATEWAY_PREFIX = b"x-gateway-"
_DECIMAL: Final = re.compile(r"[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?|\.[0-9]{1,40}")


def lines_for_backend(headers: Sequence[Header]) -> tuple[bytes, bytes]:
    r"""Return the client's headers for a backend, in order and without those meant for the gateway, and the API key's.

    Examples
    --------
    >>> lines_for_backend([(b"accept-encoding", b"br"), (b"accept", b"*/*"), (b"authorization", b"Bearer sk-1")])
    (b'accept: */*\r\n', b'authorization: Bearer sk-1\r\n')
    >>> lines_for_backend([(b"x-session-id", b"7"), (b"x-vllm-priority", b"-99")])
    (b'x-session-id: 7\r\n', b'')
    """
    lines: list[bytes] = []
    key_lines: list[bytes] = []
    named = _named_in_connection(headers)
    not_to_backend = _NOT_TO_BACKEND | named if named else _NOT_TO_BACKEND
    for header in headers:
        name = header[0]
        if name in not_to_backend or name.startswith(_GATEWAY_PREFIX):
            continue
        (key_lines if name in _API_KEY_HEADERS else lines).append(b"%b: %b\r\n" % header)
    return b"".join(lines), b"".join(key_lines)


def lines_of(headers: Iterable[Header]) -> bytes:
    """Return headers as HTTP/1.1 header lines."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def headers_of(lines: bytes) -> list[Header]:
    """Return the headers that `lines_of` wrote."""
    return [(name, value) for name, _, value in [line.partition(b": ") for line in lines.split(b"\r\n")] if name]


def lines_for_client(headers: Sequence[Header], authority: bytes) -> bytes:
    r"""Return a backend's headers for the client, without those of its connection.

    Examples
    --------
    >>> lines_for_client([(b"location", b"http://10.0.0.1:8000/v1/x"), (b"date", b"now")], b"10.0.0.1:8000")
    b'location: /v1/x\r\n'
    """
    named = _named_in_connection(headers)
    not_to_client = _NOT_TO_CLIENT | named if named else _NOT_TO_CLIENT
    lines: list[bytes] = []
    for header in headers:
        name = header[0]
        if name in not_to_client:
            if name in _LOCATIONS and (location := relative_location(header[1], authority)) is not None:
                lines.append(b"%b: %b\r\n" % (name, location))
        elif not name.startswith(_GATEWAY_PREFIX):
            lines.append(b"%b: %b\r\n" % header)
    return b"".join(lines)


def relative_location(location: bytes, authority: bytes) -> bytes | None:
    """Return a location without the address of the backend that gave it; None if it points elsewhere.

    Clients may be unable to reach a backend, and need not know where it is.

    Examples
    --------
    >>> relative_location(b"http://10.0.0.1:8000/docs/?a=1#b", b"10.0.0.1:8000"), relative_location(b"x?y", b"h:1")
    (b'/docs/?a=1#b', b'x?y')
    >>> relative_location(b"https://example.org/", b"10.0.0.1:8000") is None
    True
    """
    if b"\\" in location:  # which browsers read as a slash
        return None
    try:
        parts = urlsplit(location)
    except ValueError:
        return None
    if not (parts.scheme or parts.netloc):
        return None if location.startswith(b"//") else location
    if parts.scheme not in {b"", b"http", b"https"} or _host_and_port(parts.netloc) != _host_and_port(authority):
        return None
    path = parts.path or b"/"
    if path.startswith(b"//"):
        path = b"/." + path  # else its first segment would be read as a host: RFC 3986, section 4.2
    return urlunsplit((b"", b"", path, parts.query, parts.fragment))


def _host_and_port(authority: bytes) -> bytes:
    return authority.lower().removesuffix(b":80").removesuffix(b":443")


def positive_number(text: str) -> float | None:
    """Return a finite, positive decimal number; None for anything else, such as literals that only Python accepts.

    Examples
    --------
    >>> positive_number(" 2.5e1"), positive_number("1_0"), positive_number("0"), positive_number("1e999")
    (25.0, None, None, None)
    """
    number = float(text) if _DECIMAL.fullmatch(text.strip(" \t")) else 0.0
    return number if 0.0 < number < math.inf else None


def media_type(content_type: bytes) -> bytes:
    """Return the media type of a `content-type`, in lower case and without parameters.

    Examples
    --------
    >>> media_type(b"Application/JSON; charset=utf-8")
    b'application/json'
    """
    return content_type.partition(b";")[0].strip().lower()


def is_json(kind: bytes) -> bool:
    """Return whether a media type is JSON: `application/json`, or one such as `application/problem+json`.

    Examples
    --------
    >>> is_json(b"application/json"), is_json(b"application/problem+json"), is_json(b"application/jsonl")
    (True, True, False)
    """
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _named_in_connection(headers: Sequence[Header]) -> set[bytes]:
    """Return the headers that `connection` names, which belong to the connection too."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update([option.strip(b" \t") for option in value.lower().split(b",")])
    return named


def gateway_lines(backend: str, method: str, policy: str, reason: str, simulated: bool, retried_from: str) -> bytes:
    """Return the `x-gateway-*` headers of an answer: which backend served it, and why it was chosen."""
    headers = [
        (b"x-gateway-backend", backend.encode()),
        (b"x-gateway-method", method.encode()),
        (b"x-gateway-policy", policy.encode()),
        (b"x-gateway-reason", reason.encode()),
    ]
    if simulated:
        headers.append((b"x-gateway-simulated", b"true"))
    if retried_from:
        headers.append((b"x-gateway-retried-from", retried_from.encode()))
    return lines_of(headers)


def request_id_lines(path: str, request_id: bytes) -> bytes:
    r"""Return the header lines with the id of a request; Anthropic's clients read a header of their own.

    Examples
    --------
    >>> request_id_lines("/v1/messages", b"r1")
    b'x-request-id: r1\r\nrequest-id: r1\r\n'
    """
    if path.startswith("/v1/messages"):
        return b"x-request-id: %b\r\nrequest-id: %b\r\n" % (request_id, request_id)
    return b"x-request-id: %b\r\n" % request_id
