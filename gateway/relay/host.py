"""The exchange, as its parts see it."""

from __future__ import annotations

from typing import Protocol

from backends.backend import Backend
from backends.http.client import Receiver, UpstreamError
from gateway.relay.answers import PassThrough
from gateway.relay.attempt import Attempt
from gateway.relay.delivery import Delivery


class Host(Protocol):
    """An exchange: what its reception and its handover may ask of it."""

    attempt: Attempt | None  # the present attempt; None before the first
    delivery: Delivery  # what the client has of the answer

    def candidates(self, tried: tuple[str, ...]) -> list[Backend]:
        """Return the backends that may get the request, without those tried."""

    def reception(self) -> Receiver:
        """Return the receiver for the answer of the present attempt."""

    def cancel_call(self) -> None:
        """Cancel whatever is in flight."""

    def repeat_unasked(self) -> None:
        """Send the request to the same backend once more, which has refused to be asked for its usage."""

    def pause(self) -> None:
        """Pause reading the answer."""

    def resume(self) -> None:
        """Resume reading the answer."""

    def retry_status(self, status: int) -> bool:
        """Send the request to another backend after a 5xx of the engine; return whether it was sent."""

    def retry_or_fail(self, kind: str, message: str, *, is_strike: bool = False) -> None:
        """Try another backend, or end with an error."""

    def attempt_failed(self, error: UpstreamError) -> None:
        """Try another backend, or end with an error, after a failure of the connection."""

    def note_served(self) -> None:
        """Report that the backend has begun to serve the request: on trial, or after another one failed."""

    def fail(self, kind: str, message: str) -> None:
        """End with an error."""

    def succeed(self, answer: PassThrough) -> None:
        """End with an answer that was passed on."""
