"""Where a proxy reaches each replica."""

from __future__ import annotations

import asyncio
import logging

import pytest

from backends.backend import Backend
from backends.speculation import Method
from gateway.rooms.picker.destinations import Destinations
from tests.support.waiting import eventually


def backend(url: str) -> Backend:
    return Backend("a", "m", Method.BASELINE, url)


@pytest.mark.parametrize(
    ("url", "destination"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[fd00::1]:8000", "[fd00::1]:8000"),
    ],
)
def test_an_address_is_known_at_once(url: str, destination: str) -> None:
    assert Destinations([]).of(backend(url)) == destination


async def test_what_has_left_the_pool_is_forgotten_and_what_has_joined_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.rooms.picker.destinations._AGAIN_S", 0.01)
    pool = [backend(f"http://localhost:{port}") for port in range(8000, 8003)]
    destinations = Destinations(pool)
    await destinations.look_up()
    assert len(destinations._by_url) == len(destinations._hosts) == 3
    pool[:] = [backend("http://localhost:9000")]
    looking = asyncio.create_task(destinations.look_up_regularly())
    await eventually(lambda: destinations._by_url.keys() == destinations._hosts.keys() == {"http://localhost:9000"})
    await eventually(lambda: destinations.of(pool[0]) in {"127.0.0.1:9000", "[::1]:9000"})
    looking.cancel()


@pytest.mark.parametrize("host", ["no-such-host.invalid", f"{'a' * 64}.x"])  # of which the second can be none
async def test_a_name_that_cannot_be_resolved_does_not_keep_the_others_from_being_looked_up(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    odd, named = backend(f"http://{host}:1"), backend("http://localhost:8000")
    destinations = Destinations([odd, named])
    for _ in range(2):
        await destinations.look_up()
    assert destinations.of(odd) == ""
    assert destinations.of(named) in {"127.0.0.1:8000", "[::1]:8000"}
    assert caplog.text.count(f"{host} cannot be resolved") == 1


def test_a_unix_socket_is_out_of_a_proxys_reach(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Destinations([]).of(backend("unix:/run/engine.sock")) == ""
    assert "a proxy cannot be sent to a Unix socket" in caplog.text
