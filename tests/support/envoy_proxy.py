"""Real Envoy with the configuration of `deploy/envoy/picker.yaml`, in front of pickers and replicas of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from backends.launch.ports import free_port
from benchmarks.envoy import envoy_command, manager_of, picker_configuration
from benchmarks.process import spawned
from tests.support.command import until

Changes = Callable[[dict[str, Any]], None]
"""Changes the configuration of a listener."""


@dataclass
class Envoy:
    """A running Envoy.

    Attributes
    ----------
    urls
        Where each listener takes requests, by its name; that of deploy/ is named `""`.
    """

    urls: dict[str, str]
    admin_url: str

    def statistic(self, name: str) -> int:
        """Return the value of a counter or gauge."""
        page = httpx.get(f"{self.admin_url}/stats", params={"filter": f"^{name}$"}, trust_env=False).text
        return int(page.rpartition(": ")[2] or 0)


def picker_filter(listener: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a listener's filter that asks the picker."""
    settings: dict[str, Any] = next(
        each for each in manager_of(listener)["http_filters"] if each["name"] == "envoy.filters.http.ext_proc"
    )["typed_config"]
    return settings


@contextlib.contextmanager
def envoy_proxy(
    folder: Path, pickers: Sequence[str], replicas: Sequence[str], listeners: Mapping[str, Changes] | None = None
) -> Iterator[Envoy]:
    """Run Envoy in front of pickers, in order of priority, and replicas, all given as host and port.

    Parameters
    ----------
    listeners
        More listeners, which differ from that of deploy/.
    """
    admin_port, ports = free_port(), {name: free_port() for name in ("", *(listeners or {}))}
    document = picker_configuration(ports[""], admin_port, pickers, replicas)
    (first,) = found = document["static_resources"]["listeners"]
    for name, change in (listeners or {}).items():
        other = deepcopy(first) | {"name": name}
        other["address"]["socket_address"]["port_value"] = ports[name]
        change(other)
        found.append(other)
    envoy = Envoy({name: f"http://127.0.0.1:{port}" for name, port in ports.items()}, f"http://127.0.0.1:{admin_port}")
    log = folder / "envoy.log"
    process = spawned(envoy_command(document, folder / "envoy.yaml"), log)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        return httpx.get(f"{envoy.admin_url}/ready", trust_env=False).status_code == httpx.codes.OK

    try:
        until(is_ready, what="Envoy")
        yield envoy
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
