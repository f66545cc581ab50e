"""The picker as a room of the gateway: `gateway picker` serves it beside the clients."""

from __future__ import annotations

from gateway.gateway import Room
from gateway.rooms.picker import WORK


class PickerRoom(Room):
    """Says what the picker takes from the settings and counts; the rest is in `server`."""

    order = 12
    work = (WORK,)
    restart_keys = ("picker.listen", "picker.tls")
