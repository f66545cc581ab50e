"""Receivers of a backend's answers, and the reuse of repeated heads."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr

from backends.http.wire import HeadPattern, pattern_of

HeaderList = list[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """A request or its answer failed on the way."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        # The label value in metrics: `connect` (no connection), `broken` (closed before the end of the answer),
        # `garbage` (not HTTP/1.1) or `exhausted` (this process has no file or port left: not the backend's fault).
        self.kind = kind


@mypyc_attr(allow_interpreted_subclasses=True)
class Receiver(ABC):
    """Callbacks for an answer: `on_head` once, `on_data` for each part of the body, then `on_end` or `on_error`.

    None is called after `Call.cancel`.
    """

    @abstractmethod
    def on_head(self, status: int, headers: HeaderList) -> None:
        """Handle the final status and headers; interim (1xx) answers are skipped."""

    @abstractmethod
    def on_data(self, data: bytes) -> None:
        """Handle the next bytes of the body."""

    @abstractmethod
    def on_end(self) -> None:
        """Handle the end of a complete answer."""

    @abstractmethod
    def on_error(self, error: UpstreamError) -> None:
        """Handle the failure of the request or its answer."""


class AnswerHead:
    """The status and headers of a complete answer, shared by all answers with the same head."""

    def __init__(self, status: int, headers: HeaderList) -> None:
        self.status = status
        # Headers of the first such answer; its `content-length` and `x-request-id` do not hold for the others.
        self.headers = headers


class KnownHead:
    """The last head of a backend's answers of status 200: an answer with the same head needs no parser."""

    def __init__(self) -> None:
        self.head = AnswerHead(0, [])
        self._pattern: HeadPattern | None = None
        self._differing = 0  # consecutive complete answers with another head

    def body_in(self, data: bytes) -> bytes | None:
        """Return the body of a complete answer that starts with this head; None for all else."""
        pattern = self._pattern
        if pattern is None or (start := pattern.body_begins(data)) < 0 or len(data) - start != pattern.length:
            return None
        self._differing = 0
        return data[start:]

    def learn(self, data: bytes, headers: HeaderList) -> None:
        """Remember the head at the start of `data`; only every 64th if heads keep differing, say by a trace id."""
        self._differing += 1
        if self._differing <= 64 or self._differing % 64 == 0:
            pattern = pattern_of(data, id_varies=True)
            if pattern is not None:
                self._pattern, self.head = pattern, AnswerHead(200, headers)


@mypyc_attr(allow_interpreted_subclasses=True)
class WholeReceiver(Receiver):
    """A receiver that can take an answer that arrived in one piece in one call."""

    @abstractmethod
    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Handle a complete answer of status 200; replaces `on_head`, `on_data` and `on_end`."""
