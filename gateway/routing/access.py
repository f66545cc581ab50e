"""Access: what is checked of a request's head, before its body is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gateway.http.cors import Cors, is_preflight
from gateway.http.errors import GatewayError
from gateway.http.headers import Header
from gateway.http.paths import (
    RelayedPaths,
    canonical_path,
    is_admin,
    is_for_clients,
    is_own,
    own_root,
    relayed_target,
)
from gateway.routing.keys import UNAUTHENTICATED, Client, Keyring
from gateway.routing.request_headers import RequestHeaders

_READING_POSTS = frozenset({"/admin/explain"})
_SAFE = frozenset({"GET", "HEAD"})


class Access:
    """Who may ask for what at one address: keys, paths, and the origins of web pages."""

    def __init__(
        self,
        keyring: Keyring,
        paths: RelayedPaths | None,
        cors: Cors | None = None,
        closed: Collection[str] = (),
        public: str | None = None,
    ) -> None:
        self.keyring = keyring
        self.cors = cors  # none leaves CORS to the engines
        self._paths = paths  # none relays nothing, as at the admin address
        # Those of the gateway's own paths that are answered at another address only, or not at all, as in `own_root`.
        self._closed = frozenset(closed)
        self._public = public  # beginning of the paths below `/admin` that may be read without a key; None for none

    def admit(self, method: str, target: bytes, headers: list[Header]) -> RequestHeaders | None:
        """Check a request; return its parsed head if it is to be relayed, None if the gateway answers it itself."""
        by_name = dict(headers)
        path = canonical_path(target)
        if is_own(path) or self.is_preflight(method, path, by_name):
            self.check_own(method, path, by_name)
            return None
        return self._relayed(method, path, target, headers, by_name)

    def answers_itself(self, method: str, target: bytes, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the gateway answers a request itself: on its own paths, and for CORS."""
        path = canonical_path(target)
        return is_own(path) or self.is_preflight(method, path, headers)

    def is_preflight(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request is a preflight request that the gateway answers."""
        return (
            self.cors is not None and is_preflight(method, headers) and is_for_clients(path) and not has_body(headers)
        )

    def check_own(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Check a request that the gateway answers itself."""
        if own_root(path) in self._closed:
            raise _nothing_here()
        is_public = self._public is not None and method in _SAFE and path.startswith(self._public)
        if is_admin(path) and not is_public:
            self.keyring.check_admin(headers, writes=method not in _SAFE and path not in _READING_POSTS)
        elif has_body(headers):
            raise GatewayError(400, f"{path} takes no body: leave it out.", code="body_not_allowed")

    def relayed(self, method: str, target: bytes, headers: list[Header]) -> RequestHeaders:
        """Return the parsed head of a request to be relayed."""
        return self._relayed(method, canonical_path(target), target, headers, dict(headers))

    def _relayed(
        self, method: str, path: str, target: bytes, headers: list[Header], by_name: Mapping[bytes, bytes]
    ) -> RequestHeaders:
        if self._paths is None:
            raise _nothing_here()
        client = self.identify(method, by_name)
        if not path:
            raise GatewayError(
                400,
                "The path is not plain: send it without empty or dot segments, encoded slashes, and characters that "
                "have to be encoded.",
                code="invalid_path",
            )
        if path not in self._paths:
            raise GatewayError(
                404, f"{path} is not in `paths` of this gateway's pool file, so it is not relayed.", code="path_closed"
            )
        lines = self.lines_for(by_name)
        return RequestHeaders.read(method, client, path, relayed_target(path, target), headers, by_name, lines)

    def identify(self, method: str, headers: Mapping[bytes, bytes]) -> Client:
        """Return the client that sends a request; called before the body is read.

        A browser's preflight request (OPTIONS) has no API key, and vLLM requires none for it. It has no body either.
        """
        if method == "OPTIONS" and not (self.keyring.is_open or has_body(headers) or has_key(headers)):
            return UNAUTHENTICATED
        return self.keyring.identify(headers)

    def lines_for(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the header lines that every answer to a client gets: those of CORS."""
        return b"" if self.cors is None else self.cors.lines_for(headers.get(b"origin", b""))

    def lines_of_refusal(self, target: bytes, headers: list[Header]) -> bytes:
        """Return the header lines of an error that answers a request before it was admitted."""
        return b"" if self.cors is None or is_admin(canonical_path(target)) else self.lines_for(dict(headers))


def _nothing_here() -> GatewayError:
    return GatewayError(404, "There is nothing at this path of this address.", code="not_found")


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request announces a body.

    Examples
    --------
    >>> has_body({b"content-length": b"0"}), has_body({b"transfer-encoding": b"chunked"})
    (False, True)
    """
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""


def has_key(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request presents a key, known or not."""
    return b"authorization" in headers or b"x-api-key" in headers
