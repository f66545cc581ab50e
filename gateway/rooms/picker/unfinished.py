"""Requests whose bodies are still arriving: their size and duration are bounded as in the HTTP server."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from typing import Final, Protocol

from gateway.config.settings.server import ServerSettings
from gateway.dialects.errors import GatewayError
from gateway.http.server import SHED_SHARE, ServerLimits

_STALL_S: Final = ServerLimits().stall_s
_MOST_HELD: Final = attrgetter("held_bytes")


class Upload(Protocol):
    """A request whose body is arriving."""

    held_bytes: int  # bytes held of its body
    # began_s, read_s: when its body began, and when a piece last arrived, by `time.monotonic`.
    began_s: float
    read_s: float

    def refuse(self, error: GatewayError) -> None:
        """Answer with an error."""


class Unfinished:
    """The requests of a process whose bodies are still arriving."""

    def __init__(self, settings: Callable[[], ServerSettings]) -> None:
        self._settings = settings
        self._uploads: set[Upload] = set()
        self.held_bytes = 0  # of all of them

    def begin(self, upload: Upload) -> None:
        """Track a request until it is released."""
        upload.began_s = upload.read_s = time.monotonic()
        self._uploads.add(upload)

    def hold(self, upload: Upload, more_bytes: int) -> None:
        """Count a piece of a body; above the limit, refuse the largest requests."""
        upload.read_s = time.monotonic()
        upload.held_bytes += more_bytes
        self.held_bytes += more_bytes
        most_bytes = self._settings().max_unfinished_mib * 2**20
        if self.held_bytes > most_bytes:
            error = GatewayError(
                429, "Too many requests are being received. Try again shortly.", code="overloaded", retry_after_s=2.0
            )
            for each in sorted(self._uploads, key=_MOST_HELD, reverse=True):
                if self.held_bytes <= SHED_SHARE * most_bytes:
                    break
                self._refuse(each, error)

    def release(self, upload: Upload) -> None:
        """Forget a request that is complete or has ended."""
        self.held_bytes -= upload.held_bytes
        upload.held_bytes = 0
        self._uploads.discard(upload)

    def check(self, now_s: float) -> None:
        """Refuse the requests whose bodies take too long, or have stalled."""
        body_s = self._settings().body_s
        for each in list(self._uploads):
            if now_s - each.began_s > body_s or now_s - each.read_s > _STALL_S:
                error = GatewayError(408, "The body of the request did not arrive in time.", code="request_timeout")
                self._refuse(each, error)

    def _refuse(self, upload: Upload, error: GatewayError) -> None:
        self.release(upload)
        upload.refuse(error)
