"""Access control: reads and checks a request's head before its body is read."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gateway.dialects.errors import GatewayError, nothing_here, too_large
from gateway.http.cors import Cors, is_preflight
from gateway.http.headers import ENGINE_PRIORITY, Header, lines_for_backend, media_type, positive_number
from gateway.http.paths import (
    ADMIN_DOCS,
    canonical_path,
    endpoint_of,
    is_admin,
    is_for_clients,
    is_own,
    relayed_target,
)
from gateway.routing.keys import UNAUTHENTICATED, Client, Keyring
from policies.features.request import Endpoint

_MOST_TENANT_BYTES: Final = 128
_READING_POSTS = frozenset({"/admin/explain"})
_SAFE = frozenset({"GET", "HEAD"})
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class RoutingHeaders:
    """The `x-gateway-*`, SLO and vLLM headers of a request; empty strings for those not sent.

    Examples
    --------
    >>> headers = RoutingHeaders.read({b"x-gateway-method": b"eagle3", b"x-slo-ttft-ms": b"500"})
    >>> headers.method, headers.slo_ttft_s, headers.backend
    ('eagle3', 0.5, '')
    """

    model: str = ""
    backend: str = ""
    method: str = ""
    workload: str = ""
    slo_class: str = ""
    session: str = ""
    priority: int | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None

    @classmethod
    def read(cls, headers: Mapping[bytes, bytes]) -> RoutingHeaders:
        """Return the routing headers among `headers`, which are by lower-case name."""
        if _NAMES.isdisjoint(headers):
            return NO_ROUTING_HEADERS
        texts = [headers.get(name, b"").decode("latin-1") for name in _TEXTS]
        model, backend, method, workload, slo_class, session, priority = texts
        rank = int(priority) if _WHOLE.fullmatch(priority) else None
        ttft_s, tpot_s = _seconds(headers, b"x-slo-ttft-ms"), _seconds(headers, b"x-slo-tpot-ms")
        return cls(model, backend, method, workload, slo_class, session, rank, ttft_s, tpot_s)


_OWN: Final = (b"x-gateway-model", b"x-gateway-backend", b"x-gateway-method", b"x-gateway-workload", b"x-slo-class")
_TEXTS: Final = (*_OWN, b"x-session-id", ENGINE_PRIORITY)
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,18}")
_NAMES: Final = frozenset({*_TEXTS, b"x-slo-ttft-ms", b"x-slo-tpot-ms"})
NO_ROUTING_HEADERS: Final = RoutingHeaders()


def _seconds(headers: Mapping[bytes, bytes], name: bytes) -> float | None:
    """Return the seconds in a header of milliseconds; None without it."""
    milliseconds = _positive(headers, name, "milliseconds")
    return None if milliseconds is None else 1e-3 * milliseconds


def _positive(headers: Mapping[bytes, bytes], name: bytes, unit: str) -> float | None:
    """Return the positive number in a header; None without it."""
    if name not in headers:
        return None
    text = headers[name].decode("latin-1")
    number = positive_number(text)
    if number is None:
        message = f"{name.decode()} is {text[:40]!r}; expected a positive number of {unit}."
        raise GatewayError(400, message, code="invalid_header")
    return number


# Not frozen: a frozen dataclass sets each field by a call, which is too slow here.
@dataclass(slots=True)
class RequestHeaders:
    """The parsed head of a request; reused while the requests of a connection have equal heads."""

    method: str
    client: Client
    routing_headers: RoutingHeaders
    request_id: bytes  # the client's request id; empty if it sent none
    # lines, key_lines: header lines for the backend, and separately those with the client's API key.
    lines: bytes
    key_lines: bytes
    # path, target: the canonical path, and the same with the query, as forwarded: the backend gets what was judged.
    path: str
    target: bytes
    answer_lines: bytes  # header lines that every answer gets: those of CORS
    timeout_s: float  # the request's own limit in seconds; infinity without one
    endpoint: Endpoint  # the API
    tenant: str  # from the header that its key names; empty without one
    may_repeat: bool  # whether it may run twice: inference only costs time, others may have side effects
    form: str = ""  # the content type of a form, needed to read it; empty for other bodies


def read_head(
    method: str, client: Client, path: str, target: bytes, headers: list[Header], answer_lines: bytes = b""
) -> RequestHeaders:
    """Return the parsed head of a request whose client and path have been checked."""
    by_name = dict(headers)
    content_type = by_name.get(b"content-type", b"")
    lines, key_lines = lines_for_backend(headers)
    endpoint, timeout_s = endpoint_of(path, method), _positive(by_name, b"x-request-timeout", "seconds")
    return RequestHeaders(
        method,
        client,
        RoutingHeaders.read(by_name),
        by_name.get(b"x-request-id", b""),
        lines,
        key_lines,
        path,
        target,
        answer_lines,
        math.inf if timeout_s is None else timeout_s,
        endpoint,
        by_name.get(client.tenant_header, b"")[:_MOST_TENANT_BYTES].decode("latin-1") if client.tenant_header else "",
        may_repeat=endpoint is not Endpoint.OTHER or method in _REPEATABLE,
        form=content_type.decode("latin-1") if media_type(content_type) == b"multipart/form-data" else "",
    )


class Access:
    """The access rules of one address: keys, paths, and origins of web pages."""

    def __init__(
        self,
        keyring: Keyring,
        paths: Iterable[str],
        cors: Cors | None = None,
        closed: Collection[str] = (),
        public: tuple[str, ...] = (),
        answered: Mapping[str, int] = MappingProxyType({}),
        pages: Collection[str] = (),
    ) -> None:
        self.keyring = keyring
        self.cors = cors  # none leaves CORS to the engines
        # Relayed paths, and prefixes of others; if empty, nothing is relayed, as at the admin address.
        self._exact = frozenset(path for path in paths if not path.endswith("*"))
        self._beginnings = tuple([path[:-1] for path in paths if path.endswith("*")])
        # Prefixes of the gateway's own paths that are answered only at another address, or nowhere.
        self._closed = tuple([f"{path}/" for path in closed])
        # The gateway's own pages; also prefixes of the paths below them.
        self._pages = frozenset(pages)
        self._below_pages = tuple([f"{page}/" for page in pages])
        self._has_page = bool(self._pages.difference(closed))
        # Prefixes of the paths that are answered here to holders of a key, with the largest body of each in bytes.
        self._answered = tuple([(f"{path}/", most_bytes) for path, most_bytes in answered.items()])
        self._public = public  # prefixes of paths below `/admin` that may be read without a key

    def admit(self, method: str, target: bytes, headers: list[Header]) -> RequestHeaders | None:
        """Check a request; return its parsed head to relay it, None if the gateway answers it itself."""
        by_name, path = dict(headers), canonical_path(target)
        is_question = self.cors is not None and self.is_preflight(method, path, by_name)
        if is_own(path) or self._is_page(path) or is_question or (path == "/" and self._leads_to_page(method, by_name)):
            self.check_own(method, path, by_name)
            if is_question and self.cors is not None:
                self.cors.preflight(by_name)
            return None
        if not (self._exact or self._beginnings):
            raise nothing_here()
        client = self.identify(method, by_name)
        if not path:
            raise GatewayError(
                400,
                "The path is not plain: send it without empty or dot segments, encoded slashes, and characters that "
                "have to be encoded.",
                code="invalid_path",
            )
        for beginning, most_bytes in self._answered:
            if f"{path}/".startswith(beginning):
                if int(by_name.get(b"content-length", b"0")) > most_bytes:
                    raise too_large(most_bytes)
                return None
        if path not in self._exact and not path.startswith(self._beginnings):
            said = f"{path} is not in `paths` of this gateway's pool file, so it is not relayed."
            for meant in (f"/v1{path}", path.removeprefix("/v1")):  # of a base URL without /v1, or with a second one
                if meant != path and (meant in self._exact or meant.startswith(self._beginnings)):
                    said += f" Did you mean {meant}?"
            raise GatewayError(404, said, code="path_closed")
        return read_head(method, client, path, relayed_target(path, target), headers, self.lines_for(by_name))

    def is_preflight(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request is a preflight request that the gateway answers, if it does CORS."""
        return is_preflight(method, headers) and self.is_for_clients(path) and not has_body(headers)

    def is_for_clients(self, path: str) -> bool:
        """Return whether clients, browsers included, use a canonical path."""
        return is_for_clients(path) and not self._is_page(path)

    def _is_page(self, path: str) -> bool:
        return path in self._pages or path.startswith(self._below_pages)

    def _leads_to_page(self, method: str, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether to redirect a request for `/` to the page: a browser's, unless `paths` include `/`."""
        is_taken = "/" in self._exact or "/".startswith(self._beginnings)
        return self._has_page and method == "GET" and b"text/html" in headers.get(b"accept", b"") and not is_taken

    def check_own(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Check a request that the gateway answers itself."""
        if f"{path}/".startswith(self._closed):
            raise nothing_here()
        is_public = method in _SAFE and (path == ADMIN_DOCS or path.startswith(self._public))
        if is_admin(path) and not is_public:
            self.keyring.check_admin(headers, writes=method not in _SAFE and path not in _READING_POSTS)
        elif has_body(headers):
            raise GatewayError(400, f"{path} takes no body: leave it out.", code="body_not_allowed")

    def identify(self, method: str, headers: Mapping[bytes, bytes]) -> Client:
        """Return the client that sends a request; called before the body is read.

        A browser's preflight request (OPTIONS) has neither API key nor body, and vLLM requires no key for it.
        """
        if method == "OPTIONS" and not (self.keyring.is_open or has_body(headers) or has_key(headers)):
            return UNAUTHENTICATED
        return self.keyring.identify(headers)

    def lines_for(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the header lines that every answer to a client gets: those of CORS."""
        return b"" if self.cors is None else self.cors.lines_for(headers.get(b"origin", b""))

    def lines_of_refusal(self, target: bytes, headers: list[Header]) -> bytes:
        """Return the header lines of an error that answers a request before it was admitted."""
        return b"" if is_admin(canonical_path(target)) else self.lines_for(dict(headers))


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
