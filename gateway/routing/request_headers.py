"""The headers of a request: its client, its routing headers, and what is sent on to the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.http.headers import Header, lines_for_backend
from gateway.routing.keys import Client
from gateway.routing.router import RoutingHeaders

Identify = Callable[[str, Mapping[bytes, bytes]], Client]


# Not frozen: a frozen dataclass sets each field by a call, which is too slow for each request.
@dataclass(slots=True)
class RequestHeaders:
    """The parsed headers of a request; reused while the requests of a connection have equal headers.

    Parameters
    ----------
    request_id
        The client's request id; empty if it sent none.
    lines, key_lines
        Header lines for the backend, and separately those with the client's API key.
    """

    method: str
    client: Client
    routing_headers: RoutingHeaders
    request_id: bytes
    lines: bytes
    key_lines: bytes

    @classmethod
    def read(cls, method: str, headers: list[Header], identify: Identify) -> RequestHeaders:
        """Return the parsed headers of a request.

        Raises
        ------
        GatewayError
            401 without a valid key; raised by `identify`.
        """
        by_name = dict(headers)
        client = identify(method, by_name)
        lines, key_lines = lines_for_backend(headers)
        request_id = by_name.get(b"x-request-id", b"")
        return cls(method, client, RoutingHeaders.read(by_name), request_id, lines, key_lines)
