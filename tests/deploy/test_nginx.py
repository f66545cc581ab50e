"""nginx with the configuration of deploy/ in front of a gateway."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from backends.launch.ports import free_port
from gateway.config.settings import ServerSettings, TimeoutSettings
from gateway.service.server import _KEEP_ALIVE_S
from tests.support.certificates import make_pair
from tests.support.deploy_tools import DEPLOY, replaced, tool
from tests.support.front_proxy import check_front, proxy_process

FILE = DEPLOY / "nginx" / "gateway.conf"
READ = "proxy_read_timeout 620s;"


@contextlib.asynccontextmanager
async def nginx(gateway_port: int, folder: Path) -> AsyncIterator[str]:
    """Run nginx on a free port, with all time-outs but the one for answers at a second."""
    port = free_port()
    pair = make_pair(folder / "gateway")
    text = re.sub(r"(?m)^(    (?!proxy_read)\w+(?:_timeout)?) (30|60|2)s;", r"\1 1s;", FILE.read_text())
    text = replaced(
        text,
        {
            "listen 443 ": f"listen 127.0.0.1:{port} ",
            "listen 80;": f"listen 127.0.0.1:{free_port()};",
            "server 127.0.0.1:8080 ": f"server 127.0.0.1:{gateway_port} ",
            "/etc/nginx/gateway.crt": str(pair.certificate),
            "/etc/nginx/gateway.key": str(pair.key),
        },
    )
    assert READ in text
    (folder / "gateway.conf").write_text(text)
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "scgi", "uwsgi")
    )
    user = "user root; " if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off; pid {folder}/nginx.pid; worker_processes 1; error_log stderr;\n"
        f"events {{}}\nhttp {{ access_log off; {paths} include {folder}/gateway.conf; }}\n"
    )
    command = (tool("nginx"), "-p", folder, "-c", folder / "nginx.conf")
    async with proxy_process(*command, url=f"https://localhost:{port}", log=folder / "nginx.log") as url:
        yield url


@pytest.mark.slow
async def test_nginx_in_front_of_the_gateway(tmp_path: Path) -> None:
    await check_front(nginx, tmp_path)


def test_its_time_outs_and_sizes_leave_the_decision_to_the_gateway() -> None:
    values = dict(re.findall(r"(?m)^    (\w+) (\d+)[sm];", FILE.read_text()))
    assert int(values["proxy_read_timeout"]) > TimeoutSettings().first_byte_s
    assert int(values["keepalive_timeout"]) < _KEEP_ALIVE_S
    assert int(values["client_max_body_size"]) == ServerSettings().max_body_mib
