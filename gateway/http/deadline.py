"""The time that a request may take in all: `timeouts.total_s`, and the header `x-request-timeout`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from gateway.http.errors import GatewayError
from gateway.http.headers import positive_number

EXCEEDED: Final = "deadline_exceeded"
"""The code of the error."""

_NAME: Final = b"x-request-timeout"


def timeout_s_of(headers: Mapping[bytes, bytes]) -> float:
    """Return the seconds that a request sets for itself; infinity if it sets none.

    Examples
    --------
    >>> timeout_s_of({b"x-request-timeout": b"2.5"}), timeout_s_of({})
    (2.5, inf)
    """
    text = headers.get(_NAME)
    if text is None:
        return math.inf
    timeout_s = positive_number(text.decode("latin-1"))
    if timeout_s is None:
        shown = text[:40].decode("latin-1")
        raise GatewayError(
            400, f"x-request-timeout is {shown!r}; expected a positive number of seconds.", code="invalid_header"
        )
    return timeout_s


def exceeded(timeout_s: float) -> GatewayError:
    """Return the error for a request whose time is over."""
    return GatewayError(
        504,
        f"The answer was not complete within the {timeout_s:g} s that x-request-timeout or the pool file allows. "
        "Allow more time, or ask for less.",
        code=EXCEEDED,
    )
