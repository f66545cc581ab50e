"""The gateway of the demo, as a process that ends with the demo, in whatever way that ends."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import httpx

_START_S = 60.0
_POLL_S = 0.05
_UNTIL_INPUT_ENDS = 'exec 3<&0; "$@" & gateway=$!; { read _ <&3; kill $gateway; } & wait $gateway'
"""Shell command that runs another one, and ends it once nothing holds its input open."""


@dataclass(frozen=True, slots=True)
class DemoGateway:
    """A running gateway."""

    url: str
    client: httpx.Client  # for `/admin`, with a key made for this run

    @property
    def page_url(self) -> str:
        """Address of the page, with the key behind the `#`, which browsers send nowhere."""
        return f"{self.url}/dashboard#key={self.client.headers['authorization'].removeprefix('Bearer ')}"


@contextmanager
def running_gateway(port: int, folder: Path) -> Iterator[DemoGateway]:
    """Run a gateway with the demo's pool until the block ends; its state and log are in a folder."""
    key, log = secrets.token_hex(16), folder / "gateway.log"
    config = str(resources.files("lab.demo") / "pool.yaml")
    command = [sys.executable, "-m", "gateway", "--config", config, "--port", str(port)]
    with (
        log.open("wb") as output,
        subprocess.Popen(  # noqa: S603 -- our own program
            ["/bin/sh", "-c", _UNTIL_INPUT_ENDS, "sh", *command],
            env={**os.environ, "DEMO_FOLDER": str(folder), "DEMO_ADMIN_KEY": key},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        url = _url(process, log)
        with httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60.0, trust_env=False
        ) as client:
            while not all_up(client):  # of two that are compared, both must be there
                time.sleep(_POLL_S)
            yield DemoGateway(url, client)


def all_up(client: httpx.Client) -> bool:
    """Return whether every replica is up, where `/readyz` wants one of each model."""
    models = client.get("/admin/pool").raise_for_status().json()["models"]
    return all(each["state"] == "up" for model in models.values() for each in model["backends"].values())


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address of the gateway once it listens."""
    until_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until_s:
        if match := re.search(r"Listening at (\S+)", log.read_text("utf-8")):
            return match[1]
        time.sleep(_POLL_S)
    raise RuntimeError(log.read_text("utf-8"))
