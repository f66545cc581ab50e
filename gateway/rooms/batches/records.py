"""What is kept of files and batches, in OpenAI's form, and the marker of a batch that is open."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from gateway.rooms.batches.storage import Document, Storage

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


def keep_file(
    storage: Storage, path: str, chunks: Iterable[bytes | memoryview], name: str, purpose: str
) -> Document | None:
    """Write a file and its record, which is returned; nothing, and None, if it would be empty."""
    record = {"id": path.rpartition("/")[2], "object": "file", "created_at": int(time.time()), "expires_at": None}
    record |= {"filename": name, "purpose": purpose, "status": "processed"}
    try:
        record["bytes"] = storage.write(f"{path}.jsonl", chunks)
        if record["bytes"]:
            storage.write_json(f"{path}.json", record)
            return record
    except BaseException:
        storage.remove(f"{path}.jsonl")
        raise
    storage.remove(f"{path}.jsonl")
    return None


def batch_record(marker: Marker, endpoint: str, metadata: object, window_s: int) -> Document:
    """Return what is told of a batch that begins."""
    created_s = int(marker.created_s)
    record: dict[str, Any] = dict.fromkeys([*(f"{each}_at" for each in _TIMES), "errors"])
    record |= {"id": marker.batch_id, "object": "batch", "status": "validating", "endpoint": endpoint}
    record |= {"input_file_id": marker.file_id, "output_file_id": None, "error_file_id": None, "metadata": metadata}
    record |= {"created_at": created_s, "expires_at": created_s + window_s, "completion_window": "24h"}
    return record | {"request_counts": {"total": 0, "completed": 0, "failed": 0}}
