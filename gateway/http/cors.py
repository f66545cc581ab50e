"""CORS: which web pages may use the gateway from a browser (Fetch standard, section 3.2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gateway.dialects.errors import GatewayError
from gateway.http.headers import Header, lines_of

_METHODS = b"GET, POST"
_EXPOSED = (
    b"x-request-id, request-id, retry-after, x-gateway-backend, x-gateway-method, x-gateway-policy, x-gateway-reason, "
    b"x-gateway-retried-from, x-gateway-simulated"
)
_NAMES = re.compile(rb"[A-Za-z0-9_-]+(?:[ \t]*,[ \t]*[A-Za-z0-9_-]+)*")
_MAX_NAMES_BYTES = 4096
_MAX_AGE_S = b"600"


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request is a browser's preflight: whether it may send another one.

    Examples
    --------
    >>> is_preflight("OPTIONS", {b"origin": b"https://a.example", b"access-control-request-method": b"POST"})
    True
    """
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def without_cors(headers: Iterable[Header]) -> list[Header]:
    """Return the headers of an engine's answer without those of CORS."""
    return [
        header
        for header in headers
        if not header[0].startswith(b"access-control-") and (header[0] != b"vary" or header[1].lower() != b"origin")
    ]


class Cors:
    r"""The CORS headers of answers. Credentials of browsers (cookies) are never allowed: keys are sent in a header.

    Examples
    --------
    >>> Cors(["https://a.example"]).lines_for(b"https://b.example")
    b'vary: origin\r\n'
    """

    def __init__(self, origins: Iterable[str]) -> None:
        # Origins of the pages, `https://page.example`; `*` for all.
        self._origins = frozenset(origin.encode("ascii") for origin in origins)

    def lines_for(self, origin: bytes) -> bytes:
        """Return the header lines of an answer to a page of this origin; empty bytes mean no origin."""
        return lines_of(self._answer_headers(origin))

    def preflight(self, headers: Mapping[bytes, bytes]) -> list[Header]:
        """Return the headers of the answer to a preflight request, which has no body."""
        answered = self._answer_headers(headers.get(b"origin", b""))
        if not any(name == b"access-control-allow-origin" for name, _ in answered):
            raise GatewayError(403, "This origin is not in cors.origins of the pool file.", code="origin_not_allowed")
        answered.append((b"vary", b"access-control-request-headers"))
        asked = headers.get(b"access-control-request-headers", b"").strip()
        if asked and len(asked) <= _MAX_NAMES_BYTES and _NAMES.fullmatch(asked):
            answered.append((b"access-control-allow-headers", asked))
        return [
            *answered,
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE_S),
        ]

    def _answer_headers(self, origin: bytes) -> list[Header]:
        if b"*" in self._origins:
            allowed = b"*" if origin else b""
            headers: list[Header] = []
        else:
            allowed = origin if origin in self._origins else b""
            headers = [(b"vary", b"origin")]  # caches must keep the answers to different pages apart
        if allowed:
            headers += [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", _EXPOSED)]
        return headers
