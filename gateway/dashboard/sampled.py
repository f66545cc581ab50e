"""The observer of an exchange that is sampled; a file of its own, since observers are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from backends.backend import Backend
from gateway.relay.observers import EndedExchange, Observer
from gateway.routing.router import RoutedRequest
from policies.policy import Decision


class SampledExchange(Observer):
    """An exchange that is sampled."""

    needs_answer: ClassVar[bool] = False

    def __init__(
        self,
        routed: RoutedRequest,
        sent: Callable[[RoutedRequest, Decision, Sequence[Backend], Any], Any],
        ended: Callable[[Any, EndedExchange], None],
    ) -> None:
        self._routed = routed
        # Called with each decision, before the request is sent, and the note on the one before it, None at first;
        # returns a note.
        self._sent = sent
        self._ended = ended  # called with the last note, None if there is none, and the exchange when it has ended
        self._note: Any = None

    def on_send(self, decision: Decision, candidates: Sequence[Backend]) -> None:
        """Record a decision."""
        self._note = self._sent(self._routed, decision, candidates, self._note)

    def on_end(self, ended: EndedExchange) -> None:
        """Record the end of the exchange."""
        self._ended(self._note, ended)
