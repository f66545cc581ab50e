"""The dashboard: a page at `/dashboard`, and the live data that it shows, below `/admin/dashboard`."""

from typing import Final

from backends.background import RoomWork

WORK: Final = RoomWork("dashboard")
