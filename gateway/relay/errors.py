"""The errors that a client gets when no backend has answered its request, or not to the end."""

from __future__ import annotations

from typing import Final

from gateway.dialects.errors import GatewayError

_STATUSES: Final = {"timeout": 504, "connect": 503, "down": 503, "exhausted": 503}
_ADVICE: Final = {
    **dict.fromkeys(("connect", "down", "exhausted", "broken"), " Send the request again."),
    "timeout": " It may be busy: have the answer streamed, or ask for less.",
}


def gateway_failed() -> GatewayError:
    """Return the error for a defect of the gateway."""
    return GatewayError(500, "The gateway failed; see its log.", code="gateway_failed")


def backend_failed(backend: str, kind: str, message: str, *, has_begun: bool, may_repeat: bool) -> GatewayError:
    """Return the error for the failure of a backend.

    Examples
    --------
    >>> backend_failed("a", "broken", "closed the connection", has_begun=True, may_repeat=True).message
    'Backend a closed the connection: this answer is not complete. Send the request again.'
    """
    message = f"Backend {backend} {message}"
    if has_begun:
        message += ": this answer is not complete"
    status = _STATUSES.get(kind, 502)
    retry_after_s = 2.0 if status == 503 else None
    message = f"{message}.{_ADVICE.get(kind, '') if may_repeat else ''}"
    return GatewayError(status, message, code=f"backend_{kind}", retry_after_s=retry_after_s)
