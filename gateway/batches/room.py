"""Batches as a room of the gateway. What it takes is imported only if the settings ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gateway.rooms import Room

if TYPE_CHECKING:
    from fastapi import FastAPI

    from gateway.batches.runner import Runner
    from gateway.config.settings import PoolSettings
    from gateway.service.assembly import Gateway


class BatchesRoom(Room):
    """Keeps files and batches, and runs these."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._runner: Runner | None = None
        if gateway.settings.batches is not None:
            from gateway.batches.runner import Runner

            self._runner = Runner(gateway, gateway.settings.batches)

    @staticmethod
    def problem(settings: PoolSettings) -> str:
        """Return what is not installed, or not allowed."""
        if settings.batches is None:
            return ""
        if find_spec("fsspec") is None:
            return "batches needs fsspec: pip install '.[batches]' in a checkout (deploy/README.md#install)"
        largest_mib, body_mib = settings.batches.max_file_mib, settings.server.max_body_mib
        text = f"batches.max_file_mib is {largest_mib:g}, but server.max_body_mib {body_mib:g}: raise that"
        return text if largest_mib > body_mib else ""

    @staticmethod
    def client_paths(settings: PoolSettings) -> Sequence[str]:
        """Return the paths of files and batches."""
        return () if settings.batches is None else ("/v1/files", "/v1/batches")

    def add_routes(self, app: FastAPI) -> None:
        """Add the paths of files and batches."""
        if (runner := self._runner) is not None:
            from gateway.batches.api import batches_router

            app.include_router(batches_router(self.gateway, runner.settings, runner.storage, runner.look))

    def start(self) -> None:
        """Start running batches."""
        if self._runner is not None:
            self._runner.start()

    async def stop(self) -> None:
        """Let others go on with those that run."""
        if self._runner is not None:
            await self._runner.stop()

    def tick(self) -> None:
        """Update the series."""
        if self._runner is not None:
            self._runner.show()
