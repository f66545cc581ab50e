"""One call to one backend, and the place that it holds among the requests in flight there."""

from __future__ import annotations

import time
from typing import Final

from backends.http.client import Call
from backends.recovery import TRIAL, Recovery
from gateway.http.headers import upstream_head
from gateway.relay.context import Inbound, RelayContext
from gateway.routing.model import Upstream
from policies.policy import Decision

_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})  # sent with a content length even if the body is empty


class Attempt:
    """The part of one backend in an exchange. Its calls follow one another: only a rescue needs more than one."""

    __slots__ = (
        "_recovery",
        "call",
        "decision",
        "has_refused",
        "is_asked",
        "is_on_trial",
        "last_read_s",
        "upstream",
    )

    def __init__(self, upstream: Upstream, decision: Decision, recovery: Recovery) -> None:
        self.upstream = upstream
        self.decision = decision
        # Whether the backend gets the request to show that it can serve again.
        self.is_on_trial = decision.reason == TRIAL
        self.call: Call | None = None  # the call in flight; None before it is sent, and after its end
        self.last_read_s = 0.0  # when it was sent, or something of its answer was last read, by `time.perf_counter`
        self.is_asked = False  # whether it is asked for the usage of a stream, for the gateway alone
        self.has_refused = False  # whether it has answered with an error that it was
        self._recovery = recovery

    def take(self) -> None:
        """Take a place among the requests in flight at the backend; a call must follow."""
        self.upstream.backend.in_flight += 1
        if self.is_on_trial:
            self._recovery.begin_trial(self.upstream.backend)
        self.last_read_s = time.perf_counter()

    def release(self) -> None:
        """Release the place, at the end of the call."""
        if self.call is not None:
            self.upstream.backend.in_flight -= 1
            if self.is_on_trial:
                self._recovery.end_trial(self.upstream.backend)
            self.call = None

    def cancel(self) -> None:
        """Cancel the call; nothing more of the answer is read."""
        if self.call is not None:
            self.call.cancel()
            self.release()

    def resume(self) -> None:
        """Resume reading the answer."""
        if self.call is not None:
            self.last_read_s = time.perf_counter()  # the pause does not count as silence of the backend
            self.call.resume()


def head_for(upstream: Upstream, relay: RelayContext, inbound: Inbound, target: bytes, body: bytes) -> bytes:
    """Return the head with which a backend gets a request, or one in its place."""
    headers, api_key = inbound.request_headers, upstream.backend.api_key
    key_lines = b"" if api_key is None else b"authorization: Bearer %b\r\n" % api_key.encode()
    return upstream_head(
        headers.method,
        target,
        authority=upstream.client.address.authority,
        lines=inbound.lines,
        key_lines=headers.key_lines if api_key is None and relay.access.keyring.is_open else key_lines,
        request_id=inbound.engine_id,
        body_bytes=len(body) if body or headers.method in _WITH_BODY else None,
    )
