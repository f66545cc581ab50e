"""The request of a line, which goes the way of all requests, and its answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final, NamedTuple

import orjson

from gateway.batches.storage import Document
from gateway.dialects.errors import GatewayError
from gateway.relay.admission import admit
from gateway.relay.context import Inbound, RelayContext
from gateway.relay.exchange import Exchange
from gateway.routing.access import read_head
from gateway.routing.keys import ANONYMOUS, Client, Keyring

_LAST: Final = 1_000_001
"""A priority behind those that keys may have."""
_WEIGHT: Final = 0.001
"""Lines take no share of a model from others, whose delay weighs five times where it is chosen between replicas."""
_NOT_THEIRS: Final[dict[str, Any]] = {
    "slo_class": "",
    **dict.fromkeys(("requests_per_minute", "tokens_per_minute", "max_in_flight", "slo_ttft_s", "slo_tpot_s")),
}


def client_of_lines(keyring: Keyring, name: str) -> Client:
    """Return the client of a key's lines: with its models, but no share beside others, and no part in its limits."""
    client = ANONYMOUS if keyring.is_open else keyring.named(name)
    if client is None:
        raise GatewayError(401, "The key that this batch belongs to is gone.", code="invalid_api_key")
    return replace(client, name=f"{name} batch", id=f"{client.id} batch", priority=_LAST, weight=_WEIGHT, **_NOT_THEIRS)


class Answer(NamedTuple):
    """The answer to a line; its status is 0 if it did not end."""

    status: int
    body: bytes = b""
    request_id: str = ""

    def document(self) -> Document:
        """Return it as it is written."""
        try:
            body = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            body = self.body.decode("utf-8", "replace")
        return {"status_code": self.status, "request_id": self.request_id, "body": body}


class LineRequest:
    """A request of the gateway's own, and the reply to it."""

    def __init__(self, relay: RelayContext, client: Client, endpoint: str, body: bytes) -> None:
        self._answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._parts: list[bytes] = []
        headers = read_head("POST", client, endpoint, endpoint.encode(), [(b"content-type", b"application/json")])
        self._exchange = Exchange(relay, Inbound(headers, body), self)

    async def answer(self, closed: tuple[str, ...]) -> Answer:
        """Send the request, not to backends that are closed to it, and return its answer."""
        self._exchange.closed = closed
        admit(self._exchange)
        return await self._answer

    @property
    def backend(self) -> str:
        """The name of the backend that it is at; empty if it is at none."""
        attempt = self._exchange.attempt
        return "" if attempt is None else attempt.upstream.backend.name

    def give_up(self, status: int = 0) -> None:
        """End it without an answer of an engine."""
        if not self._answer.done():
            self.whole(status, b"", b"")
            self._exchange.client_gone()

    # Called by the exchange

    def head(self, status: int, lines: bytes) -> None:
        """Begin the answer."""
        self._status = status

    def data(self, chunk: bytes) -> None:
        """Keep bytes of the body."""
        self._parts.append(chunk)

    def end(self) -> None:
        """End the answer."""
        self.whole(self._status, b"", b"".join(self._parts))

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Take a complete answer."""
        if not self._answer.done():
            self._answer.set_result(Answer(status, body, self._exchange.delivery.request_id.decode("latin-1")))

    def abort(self) -> None:
        """Mark the answer as incomplete."""
        self.whole(0, b"", b"")
