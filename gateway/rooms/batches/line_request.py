"""The request of a line, which takes the path of all requests, and its answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import orjson

from backends.backend import Backend
from gateway.dialects.errors import GatewayError
from gateway.http.reply import Source
from gateway.relay.admission import begin
from gateway.relay.context import RelayContext
from gateway.relay.exchange import Exchange
from gateway.relay.observers import EndedExchange, Observer
from gateway.rooms.batches.lines import Document, parsed
from gateway.routing.access import read_head
from gateway.routing.keys import Client
from policies.policy import Decision

_LAST: Final = 1_000_001
"""A priority behind those that keys may have."""
_WEIGHT: Final = 0.001
"""Lines take no share of a model from other clients, whose delay weighs five times in the choice of a replica."""
_REQUEST_ID: Final = re.compile(rb"request-id: ([^\r\n]*)")
_MOST_ANSWER_BYTES: Final = 32 << 20
_NOT_THEIRS: Final[dict[str, Any]] = {
    "slo_class": "",
    **dict.fromkeys(("requests_per_minute", "tokens_per_minute", "max_in_flight", "slo_ttft_s", "slo_tpot_s")),
}


def client_of_lines(key: Client) -> Client:
    """Return the client of a key's lines, which has no share next to others; `enter_line` sets its limits."""
    return replace(key, name=f"{key.name} batch", id=f"{key.id} batch", priority=_LAST, weight=_WEIGHT, **_NOT_THEIRS)


class Answer(NamedTuple):
    """The answer to a line; its status is 0 if it is incomplete."""

    status: int
    body: bytes = b""
    request_id: str = ""
    backend: str = ""  # that answered; empty if the gateway did

    @property
    def is_refusal(self) -> bool:
        """Whether there was no place for the line."""
        return self.status in {408, 429, 503}

    @property
    def is_final(self) -> bool:
        """Whether a retry would give the same: an engine's 401 and 404 may be its own fault."""
        is_own = self.backend and self.status in {401, 404}
        return 0 < self.status < 500 and not self.is_refusal and not is_own

    def document(self) -> Document:
        """Return it for the output: JSON is kept verbatim, and not parsed if that would take long."""
        body: object = orjson.Fragment(self.body.replace(b"\n", b" ").replace(b"\r", b" "))
        try:
            parsed(self.body, most_bytes=_MOST_ANSWER_BYTES)
        except GatewayError as error:
            is_json = error.status == 413 and self.body[:1] + self.body.rstrip()[-1:] == b"{}"
            body = body if is_json else self.body.decode("utf-8", "replace")
        return {"status_code": self.status, "request_id": self.request_id, "body": body}


class LineRequest(Observer):
    """A request of the gateway's own, and the reply to it."""

    def __init__(
        self, relay: RelayContext, client: Client, path: str, body: bytes, on_send: Callable[[str], bool]
    ) -> None:
        self._answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._status, self._parts, self._left_bytes = 0, list[bytes](), _MOST_ANSWER_BYTES
        self._on_send = on_send  # called with each backend to which it is sent; returns whether another may get it
        self._relay, self._body = relay, body
        self._request = read_head("POST", client, path, path.encode(), [(b"content-type", b"application/json")])
        self._source: Source | None = None  # source of the answer: a wait for its turn, or an exchange
        self.tokens = 0  # charged to its key

    async def answer(self, closed: tuple[str, ...]) -> Answer | None:
        """Send the request to any backend not in `closed`, and return its answer; None if it is given up."""
        begin(self._relay, self._request, self._body, self, observers=[self], closed=closed)
        return await self._answer

    def give_up(self) -> bool:
        """End it without an answer; return False if it has already ended."""
        if self._answer.done():
            return False
        self._answer.set_result(None)
        self._leave()
        return True

    def _leave(self) -> None:
        if self._source is not None:
            self._source.client_gone()

    # Called by the exchange

    def answered_by(self, source: Source) -> None:
        """Keep the source of the answer, so that it can be cancelled."""
        self._source = source

    def on_send(self, decision: Decision, candidates: Sequence[Backend]) -> None:
        """Report the chosen backend; if no other one may get the request, exclude all from retries."""
        if not self._on_send(decision.backend) and isinstance(self._source, Exchange):
            self._source.close_to(tuple(each.name for each in self._relay.pool.of(candidates[0].model)))

    def on_end(self, ended: EndedExchange) -> None:
        """Record the tokens that the line is charged."""
        self.tokens = ended.tokens

    def head(self, status: int, lines: bytes) -> None:
        """Begin the answer."""
        self._status = status

    def data(self, chunk: bytes) -> None:
        """Collect bytes of the body, unless they are too many."""
        self._left_bytes -= len(chunk)
        self._parts.append(chunk)
        if self._left_bytes < 0 and not self._answer.done():
            text = f"The answer has more than {_MOST_ANSWER_BYTES >> 20} MiB."
            self.whole(413, b"", GatewayError(413, text, code="answer_too_large").body())
            asyncio.get_running_loop().call_soon(self._leave)  # not within the call that passes this on

    def end(self) -> None:
        """End the answer."""
        self.whole(self._status, b"", b"".join(self._parts))

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Take a complete answer."""
        if not self._answer.done():
            backend, found = "", _REQUEST_ID.search(lines)
            request_id = b"" if found is None else found[1]
            if isinstance(self._source, Exchange):
                attempt, delivery = self._source.attempt, self._source.delivery
                backend = attempt.upstream.backend.name if attempt is not None and delivery.has_begun else ""
                request_id = delivery.request_id
            self._answer.set_result(Answer(status, body, request_id.decode("latin-1"), backend))

    def abort(self) -> None:
        """Mark the answer as incomplete."""
        self.whole(0, b"", b"")
