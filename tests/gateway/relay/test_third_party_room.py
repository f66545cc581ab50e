"""A room of another package, which joins by its entry point and follows exchanges; compiled too."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.gateway import rooms
from tests.gateway.conftest import start_gateway
from tests.support.installed_module import installed

ROOM = """
from gateway.relay.observers import Observer
from gateway.gateway import Room


class Chunks(Observer):
    def __init__(self, seen):
        self.seen = seen

    def on_send(self, decision, candidates):
        self.seen.append(decision.backend)

    def on_end(self, ended):
        self.seen.append(ended.status)


class Counting(Room):
    def __init__(self, gateway):
        super().__init__(gateway)
        self.seen = []

    def follow(self):
        return dict.fromkeys(self.gateway.models, _Follower(self.seen))


class _Follower:
    def __init__(self, seen):
        self.seen = seen

    def follow(self, routed, body):
        return Chunks(self.seen)
"""


@pytest.mark.slow
async def test_a_room_of_another_package_follows_exchanges(tmp_path: Path) -> None:
    entry = "counting = counting_room:Counting"
    with installed(tmp_path, "counting_room", ROOM, entry, group="speculation_gateway.rooms"):
        async with start_gateway({"a": "baseline"}) as running:
            assert (await running.chat()).status_code == 200
            (room,) = [room for room in running.gateway.rooms if type(room).__name__ == "Counting"]
            await running.until(lambda: vars(room)["seen"] == ["a", 200])
    assert "Counting" not in {room.__name__ for room in rooms()}
