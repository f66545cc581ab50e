"""The headers that the gateway forwards, in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
_NOT_TO_BACKEND = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
_NOT_TO_CLIENT = _HOP_BY_HOP | {b"date", b"x-request-id"}  # the HTTP server writes its own date
_API_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_GATEWAY_PREFIX = b"x-gateway-"


def lines_for_backend(headers: Sequence[Header]) -> tuple[bytes, bytes]:
    r"""Return the client's headers for a backend, in order, without those that concern only the gateway.

    Returns
    -------
    tuple of bytes
        The header lines for every backend, and separately those with the client's API key: see `upstream_head`.

    Examples
    --------
    >>> lines_for_backend([(b"host", b"gateway"), (b"accept", b"*/*"), (b"authorization", b"Bearer sk-1")])
    (b'accept: */*\r\n', b'authorization: Bearer sk-1\r\n')
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


def upstream_head(
    method: str,
    target: bytes,
    *,
    authority: bytes,
    lines: bytes,
    key_lines: bytes,
    request_id: bytes,
    body_bytes: int | None,
) -> bytes:
    """Return the head of the request to a backend.

    Parameters
    ----------
    target
        Path and query.
    authority
        Host and port of the backend.
    lines
        Header lines from `lines_for_backend`.
    key_lines
        API key lines: the backend's own if it has a key; else the client's if the gateway has no keys, since a key
        in the request is then meant for the backend; else empty.
    body_bytes
        Length of the body; None for a request without a body.
    """
    length = b"" if body_bytes is None else b"content-length: %d\r\n" % body_bytes
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%bx-request-id: %b\r\n%b\r\n" % (
        method.encode(),
        target,
        authority,
        lines,
        key_lines,
        request_id,
        length,
    )


def lines_of(headers: Iterable[Header]) -> bytes:
    """Return headers as HTTP/1.1 header lines."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def lines_for_client(headers: Sequence[Header]) -> bytes:
    """Return a backend's headers for the client, without those of the backend's connection."""
    named = _named_in_connection(headers)
    not_to_client = _NOT_TO_CLIENT | named if named else _NOT_TO_CLIENT
    return lines_of(
        header for header in headers if header[0] not in not_to_client and not header[0].startswith(_GATEWAY_PREFIX)
    )


def _named_in_connection(headers: Sequence[Header]) -> set[bytes]:
    """Return the further headers that belong to the connection: those that `connection` names."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update([option.strip(b" \t") for option in value.lower().split(b",")])
    return named


def gateway_lines(backend: str, method: str, policy: str, reason: str, simulated: bool, retried_from: str) -> bytes:
    """Return the `x-gateway-*` headers of an answer: which backend gave it, and why it was chosen."""
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
