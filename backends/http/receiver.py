"""Who receives the answer of a backend."""

from __future__ import annotations

from typing import Protocol

HeaderList = list[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """A request failed on the way to the backend or back."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        # The label value in metrics: `connect` (no connection), `broken` (closed before the end of the answer),
        # `garbage` (not HTTP/1.1) or `exhausted` (this process has no file or port left, which is not the backend's
        # failure).
        self.kind = kind


class Receiver(Protocol):
    """Callbacks for an answer: `on_head` once, `on_data` for each part of the body, then `on_end` or `on_error`.

    None of them is called after `Call.cancel`.
    """

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Handle the final status and headers; interim (1xx) answers are skipped."""

    def on_data(self, data: bytes) -> None:
        """Handle the next bytes of the body."""

    def on_end(self) -> None:
        """Handle the end of a complete answer."""

    def on_error(self, error: UpstreamError) -> None:
        """Handle the failure of the request or its answer."""


class AnswerHead:
    """The status and headers of a complete answer, shared by all answers with the same head."""

    def __init__(self, status: int, headers: HeaderList) -> None:
        self.status = status
        # The headers of the first such answer. Its `content-length` does not hold for the others.
        self.headers = headers


class WholeReceiver(Receiver, Protocol):
    """A receiver that also takes a complete answer in one call, if it arrived in one piece."""

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Handle a complete answer of status 200; replaces `on_head`, `on_data` and `on_end`."""
