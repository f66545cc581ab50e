"""The picker as a room of the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.gateway import Room

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings


class PickerRoom(Room):
    """Says what is the picker's own; `server` has what it does."""

    order = 12
    work = ("picker",)
    restart_keys = ("picker.listen", "picker.tls")

    @staticmethod
    def is_on(settings: PoolSettings) -> bool:
        """Return that it joins none: `gateway picker` serves it at an address of its own."""
        return False
