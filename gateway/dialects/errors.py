"""The gateway's error answers, in the formats of both APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from policies.features.request import Endpoint

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    414: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    503: "overloaded_error",
}


EXCEEDED: Final = "deadline_exceeded"
"""Error code of a request that ran out of time."""


class GatewayError(Exception):
    r"""An error with which the gateway answers in place of a backend.

    Examples
    --------
    >>> GatewayError(404, "There is no model x.", code="model_not_found").body()
    b'{"error":{"message":"There is no model x.","type":"not_found_error","param":null,"code":"model_not_found"}}'
    >>> GatewayError(404, "There is no model \ud800.").message
    'There is no model \\ud800.'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status  # HTTP status
        # What is wrong, and what to do instead; it may quote a lone surrogate, which no answer can contain.
        self.message = message.encode("utf-8", "backslashreplace").decode()
        self.code = code  # OpenAI's error code, such as `model_not_found`
        self.param = param  # the request field at fault
        self.retry_after_s = retry_after_s  # seconds after which to try again, sent as `Retry-After`

    def body(self, endpoint: Endpoint = Endpoint.CHAT) -> bytes:
        """Return the body in the error format of an endpoint: OpenAI's, or Anthropic's for messages."""
        return orjson.dumps(self._document(endpoint))

    def event(self, endpoint: Endpoint) -> bytes:
        """Return the error as the final event of a stream that has begun, with the stream's end marker."""
        document = self._document(endpoint)
        if endpoint is Endpoint.MESSAGES:
            return b"event: error\ndata: " + orjson.dumps(document) + b"\n\n"
        if endpoint is Endpoint.RESPONSES:
            flat = {"type": "error", "code": self.code, "message": self.message, "param": self.param}
            return b"event: error\ndata: " + orjson.dumps(flat) + b"\n\n"
        return b"data: " + orjson.dumps(document) + b"\n\ndata: [DONE]\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer except its content length."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(self.retry_after_s))).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers

    def _document(self, endpoint: Endpoint) -> Mapping[str, Any]:
        kind = _TYPES.get(self.status, "api_error")
        if endpoint is Endpoint.MESSAGES:
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def too_large(limit_bytes: int) -> GatewayError:
    """Return the error for a body over the limit."""
    text = f"The request body is larger than the limit of {limit_bytes} bytes."
    return GatewayError(413, text, code="body_too_large")


def exceeded(timeout_s: float) -> GatewayError:
    """Return the error for a request that ran out of time."""
    return GatewayError(
        504,
        f"The answer was not complete within the {timeout_s:g} s that x-request-timeout or the pool file allows. "
        "Allow more time, or ask for less.",
        code=EXCEEDED,
    )


def nothing_here() -> GatewayError:
    """Return the error for a path that is neither relayed nor the gateway's own."""
    return GatewayError(404, "There is nothing at this path of this address.", code="not_found")


def gateway_failed() -> GatewayError:
    """Return the error for a defect of the gateway."""
    return GatewayError(500, "The gateway failed; see its log.", code="gateway_failed")
