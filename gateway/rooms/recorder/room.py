"""The recorder as a room of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.gateway import Room
from gateway.relay.observers import Follower
from gateway.rooms.recorder import WORK
from gateway.rooms.recorder.recorder import Recorder, recorder_issue

if TYPE_CHECKING:
    from pydantic import BaseModel

    from gateway.config.settings import PoolSettings
    from gateway.gateway import Gateway


class RecorderRoom(Room):
    """Records the requests of all models, if the settings ask for it."""

    order = 4
    work = (WORK,)
    restart_keys = ("recorder",)

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        settings = gateway.settings.recorder
        self.recorder = None if settings is None else Recorder(settings)
        if self.recorder is not None:
            self.keep_prompt_bytes = self.recorder.keep_prompt_bytes
            self.needs_scores = True

    @staticmethod
    def problem(settings: PoolSettings) -> str:
        """Return why the recorder could not write."""
        return "" if settings.recorder is None else recorder_issue(settings.recorder)

    @staticmethod
    def drawn(settings: PoolSettings) -> Mapping[str, BaseModel]:
        """Return its section with a salt."""
        return {} if settings.recorder is None else {"recorder": settings.recorder.salted()}

    def follow(self) -> Mapping[str, Follower]:
        """Return the recorder for each model."""
        return {} if self.recorder is None else dict.fromkeys(self.gateway.models, self.recorder)

    def start(self) -> None:
        """Start its thread."""
        if self.recorder is not None:
            self.recorder.start()

    async def stop(self) -> None:
        """Write the rest, and end the thread."""
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.stop)
            self.tick()

    def tick(self) -> None:
        """Update the series."""
        if self.recorder is not None:
            self.recorder.count(self.gateway.metrics)
