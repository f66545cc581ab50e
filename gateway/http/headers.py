"""Which headers cross the gateway, in either direction."""

from __future__ import annotations

from collections.abc import Iterable

Header = tuple[bytes, bytes]

# RFC 9110, 7.6.1: these belong to one connection, not to the message.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_SENT_ON = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
_NOT_SENT_BACK = _HOP_BY_HOP | {b"date", b"x-request-id"}  # the server in front of us writes its own date
_KEYS = frozenset({b"authorization", b"x-api-key"})
_OURS = b"x-gateway-"


def lines_for_backend(headers: Iterable[Header]) -> tuple[bytes, bytes]:
    """Write the client's headers as they go on, in their order, less what concerns only the gateway.

    Returns
    -------
    tuple of bytes
        The lines for every backend, and apart from them those with the client's key: see `upstream_head`.
    """
    lines: list[bytes] = []
    key_lines: list[bytes] = []
    for header in headers:
        name = header[0]
        if name in _NOT_SENT_ON or name.startswith(_OURS):
            continue
        (key_lines if name in _KEYS else lines).append(b"%b: %b\r\n" % header)
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
    """Write the head of the request to a backend.

    Parameters
    ----------
    lines
        Of `lines_for_backend`.
    key_lines
        The client's where the gateway has no keys of its own, so that a key in the request is meant for the backend;
        or the backend's own, which takes its place; or nothing.
    body_bytes
        None for a request without a body.
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
    """Write headers as HTTP/1.1 has them."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def lines_for_client(headers: Iterable[Header]) -> bytes:
    """Write a backend's headers as they go on to the client, less those of its connection."""
    return lines_of(one for one in headers if one[0] not in _NOT_SENT_BACK and not one[0].startswith(_OURS))


def gateway_lines(backend: str, method: str, policy: str, reason: str, simulated: bool, retried_from: str) -> bytes:
    """Write the headers that say what became of a request."""
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
