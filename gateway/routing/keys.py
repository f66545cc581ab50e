"""Who may ask: API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.http.errors import GatewayError


@dataclass(frozen=True, slots=True)
class Client:
    """Who sent a request, and what they may do.

    Parameters
    ----------
    name
        The key's name in the pool file (never the key); `anonymous` where the gateway is open.
    models
        Models that it may ask for; None for all.
    may_override
        Whether `x-gateway-backend` and `x-gateway-method` in its requests are obeyed.
    slo_ttft_s, slo_tpot_s
        Bounds of its requests that bring none: seconds to the first token, and per output token; None for none.
    """

    name: str
    models: frozenset[str] | None = None
    may_override: bool = False
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_in_flight: int | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None


ANONYMOUS = Client("anonymous", may_override=True)
"""Whoever asks an open gateway."""

STRANGER = Client("stranger")
"""Whoever asks without a key for what needs none."""


def digest(key: str | bytes) -> bytes:
    """Return the SHA-256 of a key: what is kept and compared instead of the key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


class Keyring:
    """The API keys of one gateway.

    Parameters
    ----------
    clients
        Each with the digest of its key; none makes the gateway open to all.
    """

    def __init__(self, clients: Sequence[tuple[bytes, Client]]) -> None:
        self._clients = tuple(clients)

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return not self._clients

    def named(self, name: str) -> Client | None:
        """Return the client of a key by the key's name."""
        return next((client for _, client in self._clients if client.name == name), None)

    def identify(self, headers: Mapping[bytes, bytes]) -> Client:
        """Tell who sent a request.

        Every key is compared, each in constant time, so that the time taken says nothing of any.

        Parameters
        ----------
        headers
            By lower-case name. The key is in `Authorization: Bearer KEY`, or `x-api-key` as Anthropic's clients send.

        Raises
        ------
        GatewayError
            401 if there is no key, or an unknown one.
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
        presented_digest = digest(presented)
        found: Client | None = None
        for key_digest, client in self._clients:
            if hmac.compare_digest(key_digest, presented_digest):
                found = client
        if found is None:
            raise GatewayError(401, "The API key is not one of this gateway's.", code="invalid_api_key")
        return found


def presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key that a request carries, or nothing."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and value:
        return value.strip()
    return headers.get(b"x-api-key", b"")
