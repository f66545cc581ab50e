"""What is kept of files and batches, in OpenAI's form, and the marker of a batch that is open."""

from __future__ import annotations

import os
import re
import time
from typing import Any, Final, NamedTuple

from gateway.batches.storage import Document

ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ID: Final = re.compile(r"(?:file-[0-9a-f]{32}(?:-output|-error)?|batch_[0-9a-f]{32})")
_MARKER: Final = re.compile(r"([0-9a-f]{32}|anonymous)\.(batch_[0-9a-f]{32})\.(file-[0-9a-f]{32})")
_TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Marker(NamedTuple):
    """What the name of a marker tells of an open batch; the marker is empty."""

    owner: str  # the id of its client
    batch_id: str
    file_id: str  # of its input

    @classmethod
    def read(cls, name: str) -> Marker | None:
        """Return the marker of a name; None for a name that is none."""
        found = _MARKER.fullmatch(name)
        return None if found is None else cls(*found.groups())

    @property
    def path(self) -> str:
        """Where the marker is."""
        return f"open/{'.'.join(self)}"

    @property
    def cancel_path(self) -> str:
        """Where it is marked that the batch is to be cancelled."""
        return f"{self.path}.cancel"

    @property
    def folder(self) -> str:
        """Where the batch is."""
        return f"{self.owner}/batches/{self.batch_id}"

    @property
    def created_s(self) -> float:
        """When the batch was created, which its id begins with."""
        return int(self.batch_id[6:18], 16) / 1000


def new_digits() -> str:
    """Return 32 hex digits that nobody can guess, in the order of time."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def file_record(file_id: str, size_bytes: int, name: str, purpose: str) -> Document:
    """Return what is told of a file."""
    record = {"id": file_id, "object": "file", "bytes": size_bytes, "created_at": int(time.time())}
    return record | {"filename": name, "purpose": purpose, "status": "processed", "expires_at": None}


def batch_record(marker: Marker, endpoint: str, metadata: object, window_s: int) -> Document:
    """Return what is told of a batch that begins."""
    created_s = int(marker.created_s)
    record: dict[str, Any] = dict.fromkeys([*(f"{each}_at" for each in _TIMES), "errors"])
    record |= {"id": marker.batch_id, "object": "batch", "status": "validating", "endpoint": endpoint}
    record |= {"input_file_id": marker.file_id, "output_file_id": None, "error_file_id": None, "metadata": metadata}
    record |= {"created_at": created_s, "expires_at": created_s + window_s, "completion_window": "24h"}
    return record | {"request_counts": {"total": 0, "completed": 0, "failed": 0}}
