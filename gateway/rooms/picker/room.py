"""The picker as a room of the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.gateway import Beside, Companion, Room
from gateway.rooms.picker.settings import PickerSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gateway.config.settings import PoolSettings


class PickerRoom(Room):
    """Serves the picker at an address of its own: see `server`."""

    order = 12
    work = ("picker",)
    restart_keys = ("picker.listen", "picker.tls")
    command_section = "picker"

    @staticmethod
    def is_on(settings: PoolSettings) -> bool:
        """Return whether `gateway picker` serves it."""
        return PickerSettings.of(settings) is not None

    @staticmethod
    def beside(settings: PoolSettings) -> Beside | None:
        """Return the address for the proxy."""
        if (picker := PickerSettings.of(settings)) is None:
            return None
        line = "Endpoint picker at grpc://{}  (Envoy: ext_proc)"
        return Beside("picker", picker.listen, "--listen", picker.tls, line)

    def companion(self, own: ASGIApp) -> Companion:
        """Return its server."""
        from gateway.rooms.picker.server import PickerServer

        return PickerServer(self.gateway, own)
