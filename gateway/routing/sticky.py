"""The locations of stored responses: a request that refers to one must go to the backend that holds it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,120})"')
_WHOLE_ID: Final = re.compile(r"resp_[\w-]{1,120}", re.ASCII)
_PATH: Final = "/v1/responses/"


class ResponseLocations:
    """Remembers which backend holds each recent response of the responses API.

    Examples
    --------
    >>> locations = ResponseLocations()
    >>> locations.note_answer(b'{"id": "resp_1", "object": "response"}', "a")
    >>> locations.home_of("resp_1")
    'a'
    """

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity  # number of responses remembered; a new one replaces the oldest
        self._homes: OrderedDict[str, str] = OrderedDict()
        # Called with id and backend of each response found by `note_answer`.
        self.on_new: Callable[[str, str], None] | None = None

    def note_answer(self, beginning: bytes, backend: str) -> None:
        """Remember the backend of an answer whose first bytes contain a response id."""
        if (match := _ID.search(beginning)) is not None:
            response_id = match[1].decode("latin-1")
            self.remember(response_id, backend)
            if self.on_new is not None:
                self.on_new(response_id, backend)

    def remember(self, response_id: str, backend: str) -> None:
        """Remember the backend that holds a response."""
        self._homes[response_id] = backend
        if len(self._homes) > self._capacity:
            self._homes.popitem(last=False)

    def home_of(self, response_id: str) -> str | None:
        """Return the backend with a response; None if unknown."""
        return self._homes.get(response_id)


def response_of(path: str, document: dict[str, Any]) -> str:
    """Return the id of the stored response that a request refers to; empty without one.

    Examples
    --------
    >>> response_of("/v1/responses/resp_1/cancel", {}), response_of("/v1/responses", {"previous_response_id": "resp_1"})
    ('resp_1', 'resp_1')
    """
    found = path[len(_PATH) :].partition("/")[0] if path.startswith(_PATH) else document.get("previous_response_id")
    return found if isinstance(found, str) and _WHOLE_ID.fullmatch(found) else ""
