"""The addresses that a gateway opens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from backends.launch.ports import free_port
from gateway.config.pool_file import PoolFile
from gateway.listening.listener import ListenError, open_sockets


@pytest.mark.parametrize("reuse_port", [False, True])
def test_two_addresses_of_a_gateway_are_not_one(reuse_port: bool) -> None:
    port = free_port()
    settings = PoolFile.model_validate(
        {
            "server": {"port": port, "reuse_port": reuse_port},
            "admin": {"listen": f"127.0.0.1:{port}"},
            "models": {"m": {"backends": {"a": {"method": "baseline", "url": "http://127.0.0.1:1"}}}},
        }
    )
    opened = open_sockets(settings, {}, {})
    with next(opened), pytest.raises(ListenError, match=r"admin\.listen"):
        next(opened)


def test_a_name_that_cannot_be_one_is_told() -> None:
    pool = {"server": {"host": "a..b"}, "models": {"m": {"backends": {"a": {"url": "http://127.0.0.1:1"}}}}}
    with pytest.raises(ListenError, match=r"cannot listen on a\.\.b port 8080: no such name"):
        next(open_sockets(PoolFile.model_validate(pool), {}, {}))


@pytest.mark.slow
def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "temporary").mkdir()
    config = tmp_path / "pool.yaml"
    config.write_text("models: {m: {backends: {a: {url: 'http://127.0.0.1:1'}}}}\nstate: none\n")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "gateway", "--config", str(config), "--port", port],
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert (ended.returncode, list(folder.iterdir())) == (1, [])
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr
