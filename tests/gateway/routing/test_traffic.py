"""Who uses more of a model than its share."""

from __future__ import annotations

import pytest

from gateway.routing.keys import Client
from gateway.routing.model import Traffic


def test_a_client_beyond_its_share_is_known_by_its_requests_in_flight() -> None:
    traffic, one, two, heavy = (
        Traffic(),
        Client("one", id="one"),
        Client("two", id="two"),
        Client("heavy", id="heavy", weight=2.0),
    )
    for _ in range(9):
        traffic.begin(one)
    assert traffic.overuse(one) == 1.0, "there is nobody else"
    traffic.begin(two)
    assert (traffic.overuse(one), traffic.overuse(two)) == (pytest.approx(1.8), 1.0)
    assert traffic.overuse(heavy) == 1.0, "it has none"
    for _ in range(10):
        traffic.begin(heavy)
    assert traffic.overuse(heavy) == 1.0
    assert traffic.overuse(one) == pytest.approx(1.8)
    for client in (two, *[heavy] * 10):
        traffic.end(client)
    assert (traffic.overuse(one), traffic.in_flight) == (1.0, 9)
    many = [Client("", id=f"client {number}") for number in range(20)]
    for client in many:
        traffic.begin(client)
    assert traffic.overuse(one) == 5.0
