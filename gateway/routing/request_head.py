"""The head of a request, parsed before the body: its client, its routing headers, its headers for the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.http.headers import Header, lines_for_backend
from gateway.routing.keys import Client
from gateway.routing.router import RoutingHeaders


class RequestHead:
    """The head of a request as the frontend's parser read it.

    Attributes
    ----------
    path
        Decoded path, without the query.
    target
        Path and query as received.
    headers
        Headers in order, with lower-case names, without `content-length`.
    content_length
        Value of `content-length`; empty if there is none.
    expects_continue
        Whether the client waits for `100 Continue`.
    is_http_1_1
        False for HTTP/1.0, which has no chunks: closing the connection ends the answer.
    request_headers
        The parsed headers; None until they have been parsed.
    """

    __slots__ = (
        "content_length",
        "expects_continue",
        "headers",
        "is_http_1_1",
        "keep_alive",
        "method",
        "path",
        "request_headers",
        "target",
    )

    def __init__(
        self,
        method: str,
        path: str,
        target: bytes,
        headers: list[Header],
        *,
        content_length: bytes,
        expects_continue: bool,
        is_http_1_1: bool,
        keep_alive: bool,
    ) -> None:
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.content_length = content_length
        self.expects_continue = expects_continue
        self.is_http_1_1 = is_http_1_1
        self.keep_alive = keep_alive
        self.request_headers: RequestHeaders | None = None


Identify = Callable[[str, Mapping[bytes, bytes]], Client]


# Not frozen: a frozen dataclass sets each field by a call, which is too slow for each request.
@dataclass(slots=True)
class RequestHeaders:
    """The parsed headers of a request; reused while the requests of a connection have equal headers.

    Parameters
    ----------
    headers
        Headers in order, with lower-case names.
    request_id
        The client's request id; empty if it sent none.
    lines, key_lines
        Header lines for the backend, and separately those with the client's API key.
    """

    method: str
    headers: list[Header]
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
        return cls(method, headers.copy(), client, RoutingHeaders.read(by_name), request_id, lines, key_lines)
