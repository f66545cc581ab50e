"""Reports as a room of the gateway."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.gateway import Room
from gateway.rooms.reports.outlet import Outlet
from gateway.rooms.reports.reporter import Reporter

if TYPE_CHECKING:
    from gateway.gateway import Gateway


class ReportsRoom(Room):
    """Has a reporter follow all requests, if the settings ask for one."""

    order = 5
    restart_keys = ("telemetry.otlp", "telemetry.access_log")

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        settings, self._outlets = gateway.settings.telemetry, list[Outlet]()
        if settings.otlp is not None or settings.access_log:
            reporter = gateway.relay.reporter = Reporter(settings)
            self._outlets = reporter.outlets

    def start(self) -> None:
        """Start the threads."""
        for outlet in self._outlets:
            outlet.start()

    async def stop(self) -> None:
        """Pass on the rest, and end the threads."""
        for outlet in self._outlets:
            await asyncio.to_thread(outlet.stop)
        self.tick()

    def tick(self) -> None:
        """Update the series."""
        for outlet in self._outlets:
            outlet.count(self.gateway.metrics)
