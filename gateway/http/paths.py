"""The paths of requests: their canonical form, which ones the gateway answers or relays, and the API of each."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final
from urllib.parse import unquote_to_bytes

from policies.features.request import Endpoint

_OTHER: Final = Endpoint.OTHER  # saves the lookup of the enum member
_ENDPOINTS: Final = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/messages": Endpoint.MESSAGES,
    "/v1/embeddings": Endpoint.EMBEDDINGS,
}
_OWN = frozenset({"/health", "/readyz", "/metrics", "/v1/models", "/admin"})
_PLAIN = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,=:@-]+)+")
_MODEL = "/v1/models/"
ADMIN_DOCS: Final = "/admin/docs"
"""A page about `/admin`, which holds no data."""

DEFAULT_PATHS = tuple(files("gateway.http").joinpath("default_paths.txt").read_text("utf-8").split())
"""The documented interface of vLLM, without its endpoints for development and for operating an engine."""

_DEFAULTS = {path.encode(): path for path in DEFAULT_PATHS if not path.endswith("*")}


def canonical_path(target: bytes) -> str:
    """Return the canonical path of a request target, which is the one judged and relayed; empty if it has none.

    It is percent-decoded, without a trailing slash. An ambiguous path has no canonical form: one with empty or dot
    segments, an encoded slash, percent signs after decoding, or characters that a path must encode. An encoded slash is
    accepted only within the name of a model: the gateway answers that itself.

    Examples
    --------
    >>> canonical_path(b"/v1/chat/%63ompletions/?x=1"), canonical_path(b"/v1/../admin"), canonical_path(b"/v1%2Fmodels")
    ('/v1/chat/completions', '', '')
    """
    raw = target.partition(b"?")[0]
    if (known := _DEFAULTS.get(raw)) is not None:
        return known
    path = (unquote_to_bytes(raw) if b"%" in raw else raw).decode("latin-1")
    if path == "/":
        return path
    path = path.removesuffix("/")
    if not _PLAIN.fullmatch(path) or "/./" in (dotted := f"{path}/") or "/../" in dotted:
        return ""
    return "" if b"%2f" in raw.lower() and not path.startswith(_MODEL) else path


def endpoint_of(path: str, method: str) -> Endpoint:
    """Return the API of an inference request; `Endpoint.OTHER` for requests that are only passed through.

    Examples
    --------
    >>> endpoint_of("/v1/chat/completions", "POST").name, endpoint_of("/v1/chat/completions", "OPTIONS").name
    ('CHAT', 'OTHER')
    """
    return _ENDPOINTS.get(path, _OTHER) if method == "POST" else _OTHER


def format_of(path: str) -> Endpoint:
    """Return the API whose formats a path uses, whatever the method.

    Examples
    --------
    >>> format_of("/v1/messages/count_tokens").name, format_of("/tokenize").name
    ('MESSAGES', 'OTHER')
    """
    return Endpoint.MESSAGES if path.startswith("/v1/messages/") else _ENDPOINTS.get(path, _OTHER)


def relayed_target(path: str, target: bytes) -> bytes:
    """Return the target for a backend: the canonical path, which needs no encoding, and the query as received."""
    _, mark, query = target.partition(b"?")
    return path.encode("ascii") + mark + query


def is_own(path: str) -> bool:
    """Return whether the gateway answers a canonical path itself.

    Examples
    --------
    >>> is_own("/v1/models/llama"), is_own("/v1/completions")
    (True, False)
    """
    return path in _OWN or path.startswith(("/admin/", _MODEL))


def is_admin(path: str) -> bool:
    """Return whether a canonical path belongs to `/admin`."""
    return path == "/admin" or path.startswith("/admin/")


def is_for_clients(path: str) -> bool:
    """Return whether a canonical path is for clients, browsers included: those relayed, and the models."""
    return not is_own(path) or path == "/v1/models" or path.startswith(_MODEL)
