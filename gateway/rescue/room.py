"""Rescue as a room of the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.rescue.rescue import rescue_for
from gateway.rooms import Room

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway


class RescueRoom(Room):
    """Lets another backend go on with a stream whose backend fails."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        gateway.relay.rescuer_for = rescue_for
