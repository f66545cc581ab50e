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


def upstream_headers(
    headers: Iterable[Header],
    *,
    authority: bytes,
    request_id: bytes,
    body_bytes: int,
    has_body: bool,
    api_key: str | None,
    keep_client_key: bool,
) -> list[Header]:
    """Return the headers for the backend: the client's own, in their order, less what concerns only the gateway.

    Parameters
    ----------
    api_key
        The backend's; takes the place of the client's.
    keep_client_key
        True where the gateway has no keys of its own, so that a key in the request is meant for the backend.
    """
    sent = [(b"host", authority)]
    drop_key = api_key is not None or not keep_client_key
    for name, value in headers:
        if name in _NOT_SENT_ON or name.startswith(_OURS) or (drop_key and name in _KEYS):
            continue
        sent.append((name, value))
    if api_key is not None:
        sent.append((b"authorization", b"Bearer " + api_key.encode()))
    sent.append((b"x-request-id", request_id))
    if has_body:
        sent.append((b"content-length", str(body_bytes).encode()))
    return sent


def downstream_headers(headers: Iterable[Header], *, request_id: bytes, ours: Iterable[Header]) -> list[Header]:
    """Return the headers for the client: the backend's own, less those of its connection, and the gateway's."""
    sent = [header for header in headers if header[0] not in _NOT_SENT_BACK and not header[0].startswith(_OURS)]
    sent.append((b"x-request-id", request_id))
    sent.extend(ours)
    return sent
