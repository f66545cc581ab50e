"""Envoy with the configuration of deploy/ in front of a gateway."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.launch.ports import free_port
from gateway.config.settings import ServerSettings, TimeoutSettings
from gateway.http.request_head import HeadLimits
from gateway.rooms.picker.settings import PickerSettings
from gateway.service.server import _KEEP_ALIVE_S
from tests.support.certificates import make_pair
from tests.support.deploy_tools import DEPLOY, replaced, run, tool
from tests.support.front_proxy import check_front, proxy_process

FILE = DEPLOY / "envoy" / "envoy.yaml"
PICKER_FILE = DEPLOY / "envoy" / "picker.yaml"


@contextlib.asynccontextmanager
async def envoy(gateway_port: int, folder: Path) -> AsyncIterator[str]:
    """Run Envoy on a free port, with all time-outs but the one for answers at a second, and quick health checks."""
    port = free_port()
    pair = make_pair(folder / "gateway")
    text = re.sub(r"(?<!stream_idle_timeout)(timeout): (?:30|60|300|2)s", r"\1: 1s", FILE.read_text())
    text = re.sub(r"interval: 5s", "interval: 0.2s", text)
    text = replaced(
        text,
        {
            "address: 0.0.0.0, port_value: 8443": f"address: 127.0.0.1, port_value: {port}",
            "address: 127.0.0.1, port_value: 8080": f"address: 127.0.0.1, port_value: {gateway_port}",
            "/etc/envoy/gateway.crt": str(pair.certificate),
            "/etc/envoy/gateway.key": str(pair.key),
        },
    )
    (folder / "envoy.yaml").write_text(text)
    command = (tool("envoy"), "--config-path", folder / "envoy.yaml", "--concurrency", "1", "--disable-hot-restart")
    log = folder / "envoy.log"
    async with proxy_process(*command, "--log-level", "warning", url=f"https://localhost:{port}", log=log) as url:
        yield url


@pytest.mark.slow
async def test_envoy_in_front_of_the_gateway(tmp_path: Path) -> None:
    await check_front(envoy, tmp_path)


@pytest.mark.slow
def test_envoy_accepts_the_configuration_for_the_picker() -> None:
    assert "OK" in run("envoy", "--mode", "validate", "--config-path", PICKER_FILE)


@pytest.mark.parametrize("file", [FILE, PICKER_FILE], ids=["gateway", "picker"])
def test_its_time_outs_and_sizes_leave_the_decision_to_the_gateway(file: Path) -> None:
    resources = yaml.safe_load(file.read_text())["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    cluster, *_ = resources["clusters"]
    (options,) = cluster["typed_extension_protocol_options"].values()
    settings = ServerSettings()
    assert _seconds(manager["stream_idle_timeout"]) > TimeoutSettings().first_byte_s
    assert _seconds(manager["request_timeout"]) == settings.body_s
    assert manager["max_request_headers_kb"] == HeadLimits().headers_bytes / 2**10
    assert _seconds(options["common_http_protocol_options"]["idle_timeout"]) < _KEEP_ALIVE_S
    (thresholds,) = cluster["circuit_breakers"]["thresholds"]
    assert thresholds["max_requests"] > settings.max_connections


def test_envoy_tries_as_many_endpoints_as_the_picker_names() -> None:
    resources = yaml.safe_load(PICKER_FILE.read_text())["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    route, *_ = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert route["route"]["retry_policy"]["num_retries"] == PickerSettings().fallbacks


def _seconds(text: Any) -> float:
    return float(text.removesuffix("s"))
