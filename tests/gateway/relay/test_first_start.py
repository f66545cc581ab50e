"""Requests that come before the first replica of their model: they wait, within bounds."""

from __future__ import annotations

import pytest

from backends.health import Health, State
from gateway.relay.waiting import first_start
from tests.gateway.relay.test_attempts import Relay, later


def starting(*names: str, state: State = State.STARTING) -> Relay:
    """Return a relay whose replicas have not been up."""
    relay = Relay(*names, policy={"name": "least_loaded"})
    for backend in relay.backends.values():
        backend.health = Health(state)
    return relay


def up(relay: Relay, name: str) -> None:
    """Mark a replica as up."""
    relay.backends[name].health = Health(State.UP)
    relay.context.ready(relay.backends[name])


def test_a_request_waits_for_the_first_replica_and_is_sent_there() -> None:
    relay = starting("a", "b")
    _, reply = relay.send()
    assert reply.status == 0
    up(relay, "b")
    relay.answer("b")
    assert (reply.status, reply.ended) == (200, True)
    assert relay.in_flight() == [0, 0, 0, 0, 0]


def test_a_wait_ends_with_the_reason() -> None:
    relay = starting("a")
    exchange, reply = relay.send()
    relay.context.first_start.end_overdue(later(first_start.LONGEST_S - 1.0))
    assert reply.status == 0
    relay.context.first_start.end_overdue(later(first_start.LONGEST_S))
    assert (reply.status, reply.code) == (503, "no_backend")
    assert exchange.delivery.waited_s >= first_start.LONGEST_S
    assert relay.in_flight() == [0, 0, 0, 0]


def test_what_waits_is_bounded_and_who_left_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "_MOST", 2)
    relay = starting("a")
    first, _ = relay.send()
    relay.send()
    _, refused = relay.send()
    assert (refused.status, refused.code) == (503, "no_backend")
    first.client_gone()
    last, reply = relay.send()
    assert reply.status == 0
    last.client_gone()
    up(relay, "a")
    assert len(relay.clients["a"].calls) == 1, "who has left is not served"
