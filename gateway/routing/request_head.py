"""What the headers of a request tell, read before its body: who sends it, what it wishes, what goes on to a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.http.headers import Header, lines_for_backend
from gateway.routing.keys import Client
from gateway.routing.router import RoutingHeaders


class RequestHead:
    """The head of a request as a door's parser read it.

    Attributes
    ----------
    path, target
        Without the query and with `%..` decoded; and as it came.
    headers
        In their order, names in lower case, without `content-length`.
    announced
        The value of `content-length`; empty if there is none.
    expects
        Whether it waits for `100 Continue`.
    is_http_1_1
        False for HTTP/1.0, which knows no chunks: the end of the connection is the end of the answer.
    request_headers
        None until the headers were understood.
    """

    __slots__ = (
        "announced",
        "expects",
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
        announced: bytes,
        expects: bool,
        is_http_1_1: bool,
        keep_alive: bool,
    ) -> None:
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.announced = announced
        self.expects = expects
        self.is_http_1_1 = is_http_1_1
        self.keep_alive = keep_alive
        self.request_headers: RequestHeaders | None = None


Identify = Callable[[str, Mapping[bytes, bytes]], Client]


# Not frozen, as nothing that is made for each request: that would make each of the fields cost a call to set.
@dataclass(slots=True)
class RequestHeaders:
    """The headers of one request, understood; the next request may come in the same.

    Parameters
    ----------
    method, headers
        As they came, the headers' names in lower case.
    request_id
        The client's own; empty if it sent none.
    lines, key_lines
        What goes on to a backend, ready to be written: headers, and those that carry the client's key.
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
        """Read the headers of a request.

        Raises
        ------
        GatewayError
            As `identify` does: 401 without a valid key.
        """
        named = dict(headers)
        client = identify(method, named)
        lines, key_lines = lines_for_backend(headers)
        request_id = named.get(b"x-request-id", b"")
        return cls(method, headers.copy(), client, RoutingHeaders.read(named), request_id, lines, key_lines)

    def is_of(self, method: str, headers: list[Header]) -> bool:
        """Tell whether a request with these headers would have the same headers."""
        return headers == self.headers and method == self.method
