"""Reports as a room of the gateway."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.gateway import Room
from gateway.rooms.reports.reporter import Reporter

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings
    from gateway.gateway import Gateway


class ReportsRoom(Room):
    """Has a reporter follow all requests."""

    order = 5
    restart_keys = ("telemetry.otlp", "telemetry.access_log")

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        reporter = self.reporter = Reporter(gateway.settings.telemetry)
        self.outlets = reporter.outlets

    @staticmethod
    def is_on(settings: PoolSettings) -> bool:
        """Return whether the settings ask for a report."""
        return settings.telemetry.otlp is not None or settings.telemetry.access_log > 0.0

    def start(self) -> None:
        """Start the threads."""
        for outlet in self.outlets:
            outlet.start()

    async def stop(self) -> None:
        """Pass on the rest, and end the threads."""
        for outlet in self.outlets:
            await asyncio.to_thread(outlet.stop)
        self.tick()

    def tick(self) -> None:
        """Update the series."""
        for outlet in self.outlets:
            outlet.count(self.gateway.metrics)
