"""Rescue as a room of the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.gateway import Room
from gateway.rooms.rescue.rescue import rescue_for

if TYPE_CHECKING:
    from gateway.gateway import Gateway


class RescueRoom(Room):
    """Lets another backend go on with a stream whose backend fails."""

    order = 1

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        gateway.relay.rescuer_for = rescue_for
