"""Stored responses: a request that refers to one must go to the backend that holds it, and includes its tokens."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from typing import Any, Final, NamedTuple

_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,120})"')
_WHOLE_ID: Final = re.compile(r"resp_[\w-]{1,120}", re.ASCII)
_PATH: Final = "/v1/responses/"
_MOST_CHARS: Final = 128
_UNKNOWN: Final = None, 0
_MOST_NEW: Final = 1000
_MOST_STORED: Final = 16_384
"""Responses remembered; a new one replaces the oldest."""


class Home(NamedTuple):
    """The backend that holds a response; its name alone may be that of another model's backend too."""

    model: str
    backend: str


class ResponseLocations:
    """Remembers the backend and the tokens of each recent response of the responses API.

    Examples
    --------
    >>> locations = ResponseLocations()
    >>> response_id = locations.note_answer(b'{"id": "resp_1", "object": "response"}', Home("llama", "a"))
    >>> locations.note_tokens(response_id, 120)
    >>> locations.home_of("resp_1"), locations.tokens_of("resp_1")
    (Home(model='llama', backend='a'), 120)
    """

    def __init__(self) -> None:
        # Backend and tokens by id; tokens alone for a conversation, which is not a single response.
        self._stored: OrderedDict[str, tuple[Home | None, int]] = OrderedDict()
        # Id and backend of the latest responses found by `note_answer`, until they are reported to peers.
        self.new: deque[tuple[str, Home]] = deque(maxlen=_MOST_NEW)

    def note_answer(self, beginning: bytes, home: Home) -> str:
        """Remember the backend of an answer whose first bytes have a response id; return the id, or an empty string."""
        if (match := _ID.search(beginning)) is None:
            return ""
        response_id = match[1].decode("latin-1")
        self.remember(response_id, home)
        self.new.append((response_id, home))
        return response_id

    def note_tokens(self, stored: str, tokens: int) -> None:
        """Remember the tokens of a response including all before it, or of a conversation."""
        if 0 < len(stored) <= _MOST_CHARS:
            self._keep(stored, self.home_of(stored), tokens)

    def remember(self, response_id: str, home: Home) -> None:
        """Remember the backend that holds a response."""
        self._keep(response_id, home, self.tokens_of(response_id))

    def forget(self, home: Home) -> None:
        """Forget the responses of a backend that has left, or is now another engine."""
        for stored in [held for held, (known, _) in self._stored.items() if known == home]:
            del self._stored[stored]

    def home_of(self, response_id: str) -> Home | None:
        """Return the backend with a response; None if unknown."""
        return self._stored.get(response_id, _UNKNOWN)[0]

    def tokens_of(self, stored: str) -> int:
        """Return the tokens of a response including all before it, or of a conversation; 0 if unknown."""
        return self._stored.get(stored, _UNKNOWN)[1]

    def _keep(self, stored: str, home: Home | None, tokens: int) -> None:
        self._stored[stored] = home, tokens
        if len(self._stored) > _MOST_STORED:
            self._stored.popitem(last=False)


def response_of(path: str, document: dict[str, Any]) -> str:
    """Return the id of the stored response that a request refers to; empty without one.

    Examples
    --------
    >>> response_of("/v1/responses/resp_1/cancel", {}), response_of("/v1/responses", {"previous_response_id": "resp_1"})
    ('resp_1', 'resp_1')
    """
    found = path[len(_PATH) :].partition("/")[0] if path.startswith(_PATH) else document.get("previous_response_id")
    return found if isinstance(found, str) and _WHOLE_ID.fullmatch(found) else ""
