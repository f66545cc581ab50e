"""The policies as an endpoint picker: a proxy such as Envoy asks where each request goes, and sends it there itself."""

from typing import Final

from backends.background import RoomWork

WORK: Final = RoomWork("picker")
