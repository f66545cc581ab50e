"""What bounds the lines of one batch: refusals of engines, and the tokens of its key."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.batches.lines import Line
from gateway.batches.storage import Storage
from gateway.routing.keys import Client

if TYPE_CHECKING:
    from gateway.config.settings.keys import KeySettings
    from gateway.service.assembly import Gateway

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
_MOST_REFUSALS: Final = 20
_LEAST_SENT: Final = 3
GATEWAY: Final = ""
"""Stands for the gateway among the names of backends."""


class _Cap(NamedTuple):
    """How many lines may run beside each other at a backend, and until when."""

    most: int
    until_s: float
    pause_s: float


class Refusals:
    """What engines had no place for, as one batch has seen it: what holds it up holds up no other.

    Examples
    --------
    >>> refusals, line = Refusals(), Line(0, "a", sent=1)
    >>> refusals.refuse(line, "x", beside=4, now_s=0.0), refusals.caps(0.1), refusals.caps(1.0)
    (False, {'x': 4}, {})
    >>> line.sent = 3
    >>> refusals.take("x", sent_s=1.0)
    >>> refusals.refuse(line, "x", beside=4, now_s=2.0), refusals.caps(2.0)
    (True, {})
    """

    def __init__(self) -> None:
        self._caps: dict[str, _Cap] = {}
        self._taken_s: dict[str, float] = {}  # by backend, when a line that it has answered was sent to it at last

    def caps(self, now_s: float) -> Mapping[str, int]:
        """Return how many lines may run at once at the backends that have refused some of late."""
        return {backend: cap.most for backend, cap in self._caps.items() if now_s < cap.until_s}

    def take(self, backend: str, sent_s: float) -> None:
        """Note that a backend has answered a line."""
        self._taken_s[backend] = max(sent_s, self._taken_s.get(backend, sent_s))
        self._caps.pop(GATEWAY, None)
        if backend in self._caps and not self._caps[backend].most:
            del self._caps[backend]

    def refuse(self, line: Line, backend: str, *, beside: int, now_s: float) -> bool:
        """Note that a backend had no place for a line beside others; return whether the line has failed by that.

        It is the fault of the line if the backend has answered others that were sent after its last refusal.
        """
        is_own = line.refused > 0 and self._taken_s.get(backend, -math.inf) > line.refused_s
        line.refused, line.refused_s = line.refused + 1, now_s
        if is_own:
            return line.sent >= _LEAST_SENT
        cap = self._caps.get(backend)
        if cap is None or now_s >= cap.until_s:
            is_next = cap is not None and now_s < cap.until_s + cap.pause_s
            pause_s = min(_LONGEST_PAUSE_S, 2.0 * cap.pause_s) if cap is not None and is_next else _FIRST_PAUSE_S
            self._caps[backend] = _Cap(beside, now_s + pause_s, pause_s)
        return line.refused >= _MOST_REFUSALS


class Spending:
    """The tokens of a key's lines on one day, which outlive the process."""

    def __init__(self, storage: Storage, owner: str) -> None:
        self._storage = storage
        self._path = f"{owner}/spent.json"
        self._day, self._tokens, self._is_saved = _today(), 0.0, True
        self._lines, self._mean_tokens = 0, 0.0

    def read(self) -> None:
        """Read what was spent before."""
        spent = self._storage.read(self._path) or {}
        if spent.get("day") == self._day and isinstance(tokens := spent.get("tokens"), int | float):
            self._tokens = max(self._tokens, tokens)

    def save(self) -> None:
        """Write what was spent."""
        if not self._is_saved:
            self._storage.write_json(self._path, {"day": self._day, "tokens": self._tokens})
            self._is_saved = True

    def ahead(self, lines: int) -> float:
        """Return what lines in flight are expected to cost; infinity if that is unknown."""
        return lines * self._mean_tokens if self._lines or not lines else math.inf

    def has_left(self, lines: int, per_day: float | None) -> bool:
        """Return whether another line may begin beside those in flight."""
        if per_day is None:
            return True
        if self._day != _today():
            self._day, self._tokens = _today(), 0.0
        return self._tokens + self.ahead(lines) + (self._mean_tokens if lines else 1.0) <= per_day

    def add(self, tokens: int) -> None:
        """Add the tokens of a line that was answered."""
        self._tokens, self._is_saved, self._lines = self._tokens + tokens, False, self._lines + 1
        self._mean_tokens += (tokens - self._mean_tokens) / min(self._lines, 32)


def settings_of(gateway: Gateway, client: Client) -> KeySettings | None:
    """Return the settings of a client's key as they are now; None if it has none."""
    return next((key for key in gateway.settings.keys if key.name == client.name), None)


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
