"""Where a proxy reaches each replica."""

from __future__ import annotations

import logging

import pytest

from backends.backend import Backend
from backends.speculation import Method
from gateway.picker.destinations import Destinations


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
    assert Destinations().of(backend(url)) == destination


async def test_a_name_is_looked_up() -> None:
    destinations, named = Destinations(), backend("http://localhost:8000")
    assert destinations.of(named) == ""
    await destinations.start([named])
    assert destinations.of(named) in {"127.0.0.1:8000", "[::1]:8000"}
    await destinations.stop()


async def test_a_name_that_cannot_be_resolved_is_logged_and_has_no_destination(
    caplog: pytest.LogCaptureFixture,
) -> None:
    destinations, named = Destinations(), backend("http://no-such-host.invalid:8000")
    await destinations.start([named])
    await destinations.stop()
    assert destinations.of(named) == ""
    assert "no-such-host.invalid cannot be resolved" in caplog.text


def test_a_unix_socket_is_out_of_a_proxys_reach(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Destinations().of(backend("unix:/run/engine.sock")) == ""
    assert "a proxy cannot be sent to a Unix socket" in caplog.text
