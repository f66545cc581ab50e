"""The two ways to restart a replica with another method: an engine of the gateway's, and a Deployment of Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lab.autopilot.deployment import Deployment
from lab.autopilot.gateway_admin import LOOK_S, UP, ChangeError, GatewayAdmin
from lab.autopilot.journal import Speculation
from lab.autopilot.pool_text import rewrite

_NOTICED_S = 60.0


class Restart(Protocol):
    """A way to restart a replica."""

    async def __call__(self, backend: str, runs: Speculation) -> None:
        """Restart a drained replica, unless it runs that already, and return once it serves requests again."""


@dataclass(frozen=True, slots=True)
class OfGateway:
    """Restarts a replica with `serve`.

    Parameters
    ----------
    config
        The pool file, which the gateway reads too.
    limit_s
        Seconds that a replica may take until it is up.
    """

    gateway: GatewayAdmin
    config: Path
    limit_s: Mapping[str, float]

    async def __call__(self, backend: str, runs: Speculation) -> None:
        """Rewrite the pool file, and have the gateway start the replica anew."""
        await _reload(self.gateway, self.config, backend, runs, restart=backend)

        def is_up(backends: Mapping[str, Any]) -> bool:
            now = backends[backend]
            if now["process"] == "backoff":
                raise ChangeError(f"{backend} does not start with {runs}: {now['last_exit']}; its log has the reason")
            return now["process"] == "ready" and now["state"] in UP

        await self.gateway.until(f"{backend} is up with {runs}", is_up, self.limit_s[backend])


@dataclass(frozen=True, slots=True)
class OfDeployment:
    """Restarts a replica that is the only pod of a Deployment."""

    gateway: GatewayAdmin
    config: Path
    deployments: Mapping[str, Deployment]

    async def __call__(self, backend: str, runs: Speculation) -> None:
        """Patch the Deployment, wait for its rollout, and have the gateway read the rewritten pool file."""
        await self.deployments[backend].run(runs)
        await _reload(self.gateway, self.config, backend, runs)
        await self.gateway.until(f"{backend} is up", lambda backends: backends[backend]["state"] in UP, _NOTICED_S)


async def _reload(
    gateway: GatewayAdmin, config: Path, backend: str, runs: Speculation, restart: str | None = None
) -> None:
    """Write what a replica runs into the pool file, have the gateway read it, and end the drain of the replica."""
    await asyncio.to_thread(rewrite, config, gateway.model, backend, runs.method, runs.config)
    await gateway.reload(restart)
    if not await gateway.serves(backend, runs):
        raise ChangeError(f"the gateway at {gateway.admin_url} does not read {config}: its {backend} is another")
    await gateway.resume(backend)
    await asyncio.sleep(LOOK_S)  # until all workers know
