"""The folders of rooms: each has one room, which has a place of its own."""

from __future__ import annotations

from gateway.gateway import rooms
from tests.gateway.conftest import MODEL, start_gateway
from tests.support.paths import ROOT


def test_each_folder_has_one_room_with_a_place_of_its_own() -> None:
    own = [room for room in rooms() if room.__module__.startswith("gateway.rooms.")]
    folders = sorted(path.parent.name for path in ROOT.glob("gateway/rooms/*/__init__.py"))
    assert sorted(room.__module__.split(".")[2] for room in own) == folders
    places = [room.order for room in own]
    assert places == sorted(set(places))


async def test_what_the_settings_do_not_ask_for_follows_no_request() -> None:
    async with start_gateway({"a": "baseline"}) as running:
        assert running.gateway.relay.followers == {MODEL: []}
