"""Rescue as a room of the gateway."""

from __future__ import annotations

from gateway.gateway import Room
from gateway.rooms.rescue.rescue import rescue_for


class RescueRoom(Room):
    """Lets another backend resume a stream whose backend fails."""

    order = 1
    rescuer_for = staticmethod(rescue_for)
