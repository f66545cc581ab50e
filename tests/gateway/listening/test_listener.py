"""The addresses that a gateway opens."""

from __future__ import annotations

import contextlib

import pytest

from backends.launch.ports import free_port
from gateway.config.settings import PoolSettings
from gateway.listening.listener import ListenError, open_sockets


@pytest.mark.parametrize("reuse_port", [False, True])
def test_two_addresses_of_a_gateway_are_not_one(reuse_port: bool) -> None:
    port = free_port()
    settings = PoolSettings.model_validate(
        {
            "server": {"port": port, "reuse_port": reuse_port},
            "admin": {"listen": f"127.0.0.1:{port}"},
            "models": {"m": {"backends": {"a": {"method": "baseline", "url": "http://127.0.0.1:1"}}}},
        }
    )
    with contextlib.ExitStack() as stack, pytest.raises(ListenError, match=r"admin\.listen"):
        for opened in open_sockets(settings, {}, {}):
            stack.enter_context(opened)
