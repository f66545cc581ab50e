"""The gateway of the demo, as a process that ends with the demo, in whatever way that ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from backends import background
from backends.launch.process import EngineProcess

_START_S = 60.0
_END_S = 20.0
_POLL_S = 0.05


@dataclass
class DemoGateway:
    """A running gateway."""

    url: str = ""  # its address
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)  # its admin key, made for this run

    @property
    def page_url(self) -> str:
        """Address of the page, with the key behind the `#`, which browsers send nowhere."""
        return f"{self.url}/dashboard#key={self.key}"

    def client(self) -> httpx.AsyncClient:
        """Return a client for `/admin`."""
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60.0, trust_env=False)


@contextlib.asynccontextmanager
async def running_gateway(port: int) -> AsyncIterator[DemoGateway]:
    """Run a gateway with the demo's pool until the block ends; its state and log are in a temporary folder."""
    gateway = DemoGateway()
    with TemporaryDirectory(prefix="gateway-demo-") as folder:
        log = Path(folder) / "gateway.log"
        config = str(resources.files("lab.demo") / "pool.yaml")
        command = [sys.executable, "-m", "gateway", "--config", config, "--port", str(port)]
        process = await EngineProcess.start(command, {"DEMO_FOLDER": folder, "DEMO_ADMIN_KEY": gateway.key}, log)
        ended = background.start("lab", process.wait(), raises=Exception)
        try:
            await _started(gateway, log, ended)
            yield gateway
        finally:
            process.terminate()
            await asyncio.wait({ended}, timeout=_END_S)
            process.kill()
            await ended


async def _started(gateway: DemoGateway, log: Path, ended: asyncio.Future[int]) -> None:
    async with asyncio.timeout(_START_S):
        while not gateway.url:
            if ended.done():
                raise RuntimeError(_text_of(log))
            if match := re.search(r"Listening at (\S+)", _text_of(log)):
                gateway.url = match[1]
            await asyncio.sleep(_POLL_S)
        async with gateway.client() as client:
            answer = await client.get("/readyz")
            while not answer.is_success:  # the replicas start
                await asyncio.sleep(_POLL_S)
                answer = await client.get("/readyz")


def _text_of(log: Path) -> str:
    return log.read_text(encoding="utf-8")
