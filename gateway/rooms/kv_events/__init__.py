"""What engines tell of their KV caches, by vLLM's `--kv-events-config`."""

from typing import Final

from backends.background import RoomWork

WORK: Final = RoomWork("kv events")
