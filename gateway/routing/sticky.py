"""Which backend keeps which stored response: what refers to one can only be answered there."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,120})"')
_PATH: Final = "/v1/responses/"


class ResponseLocations:
    """Remembers where the latest responses of the responses API were made.

    Parameters
    ----------
    capacity
        Responses remembered; the oldest is forgotten for a new one.
    """

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._homes: OrderedDict[str, str] = OrderedDict()
        self.on_new: Callable[[str, str], None] | None = None

    def note_answer(self, beginning: bytes, backend: str) -> None:
        """Take note of an answer by its first bytes."""
        if (match := _ID.search(beginning)) is not None:
            response_id = match[1].decode("latin-1")
            self.remember(response_id, backend)
            if self.on_new is not None:
                self.on_new(response_id, backend)

    def remember(self, response_id: str, backend: str) -> None:
        """Take note of where a response was made."""
        self._homes[response_id] = backend
        if len(self._homes) > self._capacity:
            self._homes.popitem(last=False)

    def home_of(self, path: str, document: dict[str, Any]) -> str | None:
        """Return the backend that a request must go to because it refers to a response; None for any other request."""
        if path.startswith(_PATH):
            return self._homes.get(path[len(_PATH) :].partition("/")[0])
        previous = document.get("previous_response_id")
        return self._homes.get(previous) if isinstance(previous, str) else None
