"""The headers of a request: its client, its routing headers, and what is sent on to the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.http.deadline import timeout_s_of
from gateway.http.headers import Header, lines_for_backend
from gateway.routing.keys import Client
from gateway.routing.router import RoutingHeaders


# Not frozen: a frozen dataclass sets each field by a call, which is too slow for each request.
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
    # path, target: the canonical path, and with the query as it is sent on: what was judged is what the backend gets.
    path: str
    target: bytes
    answer_lines: bytes  # header lines that every answer gets: those of CORS
    timeout_s: float  # seconds that the request may take, as it says itself; infinity if it does not

    @classmethod
    def read(
        cls,
        method: str,
        client: Client,
        path: str,
        target: bytes,
        headers: list[Header],
        by_name: Mapping[bytes, bytes],
        answer_lines: bytes,
    ) -> RequestHeaders:
        """Return the parsed head of a request whose client and path have been checked."""
        timeout_s = timeout_s_of(by_name)
        lines, key_lines = lines_for_backend(headers)
        request_id = by_name.get(b"x-request-id", b"")
        routing_headers = RoutingHeaders.read(by_name)
        return cls(method, client, routing_headers, request_id, lines, key_lines, path, target, answer_lines, timeout_s)
