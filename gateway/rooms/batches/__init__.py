"""Batches: OpenAI's files and batches, whose lines run in what the requests of others leave."""

from typing import Final

from backends.background import RoomWork

WORK: Final = RoomWork("batches")
