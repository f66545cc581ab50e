"""Envoy with the configuration of `deploy/envoy/picker.yaml`, at other addresses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).parents[1] / "deploy" / "envoy" / "picker.yaml"
_FILTERS_OF_PICKER = 2
_QUICK = {"interval": "0.1s", "no_traffic_interval": "0.1s"}


def endpoint(address: str) -> dict[str, Any]:
    """Return an endpoint of a cluster, from its host and port."""
    host, _, port = address.rpartition(":")
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}


def picker_configuration(
    port: int, admin_port: int, pickers: Sequence[str], replicas: Sequence[str], *, is_shown: bool = True
) -> dict[str, Any]:
    """Return the configuration with other addresses, on this machine, and quick health checks.

    Parameters
    ----------
    pickers
        Their hosts and ports, in order of priority.
    is_shown
        Whether the picker is shown the answers.
    """
    document: dict[str, Any] = yaml.safe_load(_FILE.read_text())
    resources = document["static_resources"]
    resources["listeners"][0]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    of_replicas, of_pickers = resources["clusters"]
    of_replicas["load_assignment"]["endpoints"] = [{"lb_endpoints": [endpoint(each) for each in replicas]}]
    of_pickers["load_assignment"]["endpoints"] = [
        {"priority": priority, "lb_endpoints": [endpoint(each)]} for priority, each in enumerate(pickers)
    ]
    of_pickers["health_checks"][0] |= _QUICK
    if not is_shown:
        del manager_of(resources["listeners"][0])["http_filters"][1]
    document["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin_port}}}
    return document


def manager_of(listener: dict[str, Any]) -> dict[str, Any]:
    """Return the connection manager of a listener."""
    manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def without_picker(document: dict[str, Any]) -> dict[str, Any]:
    """Remove the filters that ask the picker, so that replicas take turns; return the configuration."""
    manager = manager_of(document["static_resources"]["listeners"][0])
    del manager["http_filters"][:_FILTERS_OF_PICKER]
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        route.pop("typed_per_filter_config", None)
    return document


def envoy_command(document: dict[str, Any], file: Path) -> list[str]:
    """Write a configuration to a file, and return the command of Envoy with one worker."""
    file.write_text(yaml.safe_dump(document))
    binary = str(Path(sys.executable).with_name("envoy"))
    return [binary, "--config-path", str(file), "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
