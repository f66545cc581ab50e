"""The recorder as a room of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.gateway import Room
from gateway.relay.observers import Follower
from gateway.rooms.recorder.recorder import Recorder, recorder_issue
from gateway.rooms.recorder.settings import RecorderSettings

if TYPE_CHECKING:
    from pydantic import BaseModel

    from gateway.config.settings import PoolSettings
    from gateway.gateway import Gateway


class RecorderRoom(Room):
    """Records the requests of all models."""

    order = 4
    work = ("recorder",)
    restart_keys = ("recorder",)
    needs_scores = True

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        settings = RecorderSettings.of(gateway.settings)
        assert settings is not None
        self.recorder = Recorder(settings)
        self.keeps_texts = settings.text == "full"
        self.keep_prompt_bytes = self.recorder.keep_prompt_bytes

    @staticmethod
    def is_on(settings: PoolSettings) -> bool:
        """Return whether the settings enable it."""
        return RecorderSettings.of(settings) is not None

    @staticmethod
    def problem(settings: PoolSettings) -> str:
        """Return why the recorder could not write."""
        recorder = RecorderSettings.of(settings)
        return "" if recorder is None else recorder_issue(recorder)

    @staticmethod
    def drawn(settings: PoolSettings) -> Mapping[str, BaseModel]:
        """Return its section with a random salt if it needs one."""
        recorder = RecorderSettings.of(settings)
        return {} if recorder is None else {recorder.key: recorder.salted()}

    def follow(self) -> Mapping[str, Follower]:
        """Return the recorder for each model."""
        return dict.fromkeys(self.gateway.models, self.recorder)

    def start(self) -> None:
        """Start its thread."""
        self.recorder.start()

    async def stop(self) -> None:
        """Write the rest, and end the thread."""
        await asyncio.to_thread(self.recorder.stop)
        self.tick()

    def tick(self) -> None:
        """Update the series."""
        self.recorder.count(self.gateway.metrics)
