"""One request whose bytes a proxy carries: the gateway chooses its backend, and observes the answer."""

from __future__ import annotations

import random

from backends.http.receiver import HeaderList
from gateway.http.headers import request_id_lines
from gateway.relay.attempt import Attempt
from gateway.relay.exchange import Exchange
from gateway.rooms.picker.destinations import Destinations
from policies.features.request import Endpoint
from policies.policy import Decision


class Picked:
    """An exchange whose request a proxy sends, and whose answer it passes on.

    Admission, choice and accounting are the relay's. Retries are the proxy's: it knows where else the request may go.
    """

    def __init__(self, exchange: Exchange, destinations: Destinations, answers: float) -> None:
        self._exchange = exchange
        self._destinations = destinations
        self._is_sampled = random.random() < answers  # whether a learning policy should see the answer
        self.is_read = False  # whether the proxy shows the answer

    @property
    def is_sent(self) -> bool:
        """Whether a backend has been chosen."""
        return self._exchange.attempt is not None

    def needs_answer(self) -> bool:
        """Return whether anything needs the body of the answer."""
        exchange = self._exchange
        if exchange.request.client.tokens_per_minute is not None:
            return True
        if any(observer.needs_answer for observer in exchange.delivery.observers):
            return True
        is_inference = exchange.delivery.endpoint is not Endpoint.OTHER
        return is_inference and self._is_sampled and exchange.routed.model.observe is not None

    def served_by(self, destination: str) -> None:
        """Handle the destination that answered: a fallback if the proxy could not reach the chosen one."""
        first = self._exchange.attempt
        if first is None or destination == self._destinations.of(first.upstream.backend):
            return
        for upstream in self._exchange.routed.model.upstreams.values():
            if self._destinations.of(upstream.backend) == destination:  # else not a replica of this pool
                self._exchange.served_by(upstream, Decision(upstream.backend.name, "override", "fallback"))
                return

    def lines_for_client(self) -> bytes:
        """Return header lines for the answer: the id of the request, and which backend was chosen and why."""
        request, attempt, delivery = self._exchange.request, self._exchange.attempt, self._exchange.delivery
        choice_lines = b""
        if attempt is not None:
            choice_lines = attempt.upstream.lines_of_choice(attempt.decision, delivery.retried_from)
        return request_id_lines(request.path, delivery.request_id) + request.answer_lines + choice_lines

    def on_head(self, status: int, headers: HeaderList, *, is_read: bool) -> None:
        """Handle the head of the answer; called again if it turns out later that its body is read."""
        attempt = self._exchange.attempt
        if attempt is None or attempt.call is None:
            return
        self.is_read = self.is_read or is_read
        if self.is_read:
            attempt.call.resume()
        else:
            attempt.call.pause()  # its silence is not the backend's
        if self._exchange.delivery.answer is None:
            attempt.on_head(status, headers)

    def on_data(self, data: bytes) -> None:
        """Handle bytes of the answer that the proxy has passed on."""
        if (attempt := self._open()) is not None:
            attempt.on_data(data)

    def on_end(self) -> None:
        """Handle the end of the answer."""
        if (attempt := self._open()) is None:
            return
        if self.is_read:
            attempt.on_end()
        else:
            self.client_gone()

    def pause(self) -> None:
        """Do nothing: the proxy passes the answer on."""

    def resume(self) -> None:
        """Do nothing."""

    def client_gone(self) -> None:
        """Handle the proxy's end of the stream: the request has ended, or was cancelled."""
        answer, attempt = self._exchange.delivery.answer, self._open()
        if attempt is None or answer is None or self.is_read:
            self._exchange.client_gone()
        else:
            self._exchange.succeed(attempt, answer)

    def _open(self) -> Attempt | None:
        return self._exchange.attempt if self._exchange.is_open else None
