"""API keys, compared in constant time, and the clients they identify. Only their SHA-256 is kept."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.dialects.errors import GatewayError


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request, with its permissions and limits.

    Examples
    --------
    >>> Client("team", models=frozenset({"llama"}), max_in_flight=8).may_override
    False
    """

    # The key's name in the pool file (never the key itself), for people: a reload may give it to another key.
    # `anonymous` if the gateway is open.
    name: str
    models: frozenset[str] | None = None  # models that the client may use; None for all
    may_override: bool = False  # whether the client may choose backends with `x-gateway-backend` and `x-gateway-method`
    # requests_per_minute, tokens_per_minute, max_in_flight: limits; None for no limit.
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_in_flight: int | None = None
    # slo_ttft_s, slo_tpot_s: SLOs of requests without SLO headers: seconds to the first token, and per output token;
    # None for no SLO.
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_class: str = ""  # name of the class of its requests; empty for none
    admin: str = "none"  # what the client may do at `/admin`: `none`, `read` or `write`
    priority: int = 0  # priority of its requests in the queues of models; lower ones are served first
    weight: float = 1.0  # its share of a model relative to other clients, where requests wait
    tenant_header: bytes = b""  # header, in lower case, that names a request's tenant; empty for none
    adapters: frozenset[str] | None = None  # LoRA adapters that it may use; None for all of its models
    id: str = ""  # key of all state kept for the client; derived from the API key, so never reused

    def may_use(self, model: str) -> bool:
        """Return whether the client may use a model."""
        return self.models is None or model in self.models

    def may_adapt(self, model: str, adapter: str) -> bool:
        """Return whether the client may use an adapter of a model."""
        return self.may_use(model) if self.adapters is None else adapter in self.adapters

    @property
    def source(self) -> str:
        """The source of evidence of its requests: the key, also for batch lines; empty if the gateway is open."""
        key = self.id.partition(" ")[0]
        return "" if key == ANONYMOUS.id else key


ANONYMOUS = Client("anonymous", may_override=True, id="anonymous")
"""The client of all requests to an open gateway."""

UNAUTHENTICATED: Final = Client("unauthenticated", models=frozenset(), max_in_flight=16, id="unauthenticated")
"""The client of requests that need no key, such as preflight requests. They take no places from clients with a key."""


def digest(key: str | bytes) -> bytes:
    """Return the SHA-256 digest of a key, which is stored and compared instead of the key.

    Examples
    --------
    >>> digest("sk-1") == digest(b"sk-1"), len(digest("sk-1"))
    (True, 32)
    """
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def _id_of(key_digest: bytes) -> str:
    """Return the id of a key's client, which does not reveal the stored digest."""
    return hashlib.sha256(b"client " + key_digest).hexdigest()[:32]


class Keyring:
    """The API keys of a gateway.

    Examples
    --------
    >>> keyring = Keyring([(digest("sk-1"), Client("team"))])
    >>> keyring.identify({b"authorization": b"Bearer sk-1"}).name
    'team'
    >>> keyring.identify({b"x-api-key": b"sk-2"})
    Traceback (most recent call last):
    gateway.dialects.errors.GatewayError: This gateway does not know the API key.
    """

    def __init__(self, clients: Sequence[tuple[bytes, Client]], admin: bytes | None = None) -> None:
        # Pairs of key digest and client; without any, the gateway is open.
        self._clients = tuple([(digest, replace(client, id=_id_of(digest))) for digest, client in clients])
        self.is_open = not self._clients  # whether requests need no key
        self._by_id = {client.id: client for _, client in self._clients} or {ANONYMOUS.id: ANONYMOUS}
        self._by_name = {client.name: client for _, client in self._clients}
        # Digest of the admin key, which may do everything at `/admin` and nothing else; None if there is none.
        self._admin = admin

    @property
    def clients(self) -> tuple[Client, ...]:
        """The clients of all keys."""
        return tuple(client for _, client in self._clients)

    def named(self, name: str) -> Client | None:
        """Return the client of the key with a given name; None if there is no such key."""
        return self._by_name.get(name)

    def with_id(self, client_id: str) -> Client | None:
        """Return the client with a given id; None if its key is not, or no longer, here."""
        return self._by_id.get(client_id)

    def identify(self, headers: Mapping[bytes, bytes]) -> Client:
        """Return the client that sent a request.

        It compares all keys, each in constant time, so that the time taken reveals nothing about them.
        """
        if not self._clients:
            return ANONYMOUS
        presented = presented_key(headers)
        if not presented:
            raise GatewayError(
                401,
                "This gateway needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="missing_api_key",
            )
        client = self._find(presented)
        if client is None:
            raise GatewayError(401, "This gateway does not know the API key.", code="invalid_api_key")
        return client

    def check_admin(self, headers: Mapping[bytes, bytes], *, writes: bool) -> None:
        """Check that a request may use `/admin`."""
        presented = presented_key(headers)
        if presented and self._admin is not None and hmac.compare_digest(self._admin, digest(presented)):
            return
        client = self._find(presented) if presented else None
        if client is None:
            raise GatewayError(
                401,
                "/admin needs an admin key, as 'Authorization: Bearer KEY': admin.key of the pool file, the key "
                "printed at start, or one of keys with the scope admin.",
                code="invalid_admin_key",
            )
        if client.admin != "write" and (writes or client.admin != "read"):
            raise GatewayError(
                403,
                f"Key {client.name!r} may not {'change' if writes else 'read'} this: it needs "
                f"admin: {'write' if writes else 'read'}.",
                code="admin_not_allowed",
            )

    def _find(self, presented: bytes) -> Client | None:
        presented_digest = digest(presented)
        match: Client | None = None
        for key_digest, client in self._clients:
            if hmac.compare_digest(key_digest, presented_digest):
                match = client
        return match


def presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the API key in the headers of a request; empty if there is none.

    Examples
    --------
    >>> presented_key({b"authorization": b"Bearer sk-1"}), presented_key({b"x-api-key": b"sk-2"})
    (b'sk-1', b'sk-2')
    """
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and value:
        return value.strip()
    return headers.get(b"x-api-key", b"")
