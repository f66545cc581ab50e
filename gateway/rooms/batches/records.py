"""The records of files and batches, shown and stored in OpenAI's format.

`OWNER/files/FILE` holds a file; `open/OWNER.BATCH` a batch that has not ended, with `.cancel` and `.notes` next to it;
`OWNER/batches/BATCH` one that has; `spent/OWNER` the tokens of a key's lines.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
ID: Final = re.compile(r"(?:file-[0-9a-f]{32}(?:-output|-error)?|batch_[0-9a-f]{32})")
_OPEN: Final = re.compile(r"open/([0-9a-f]{32}|anonymous)\.(batch_[0-9a-f]{32})(?:\.cancel|\.notes)?")


def new_digits() -> str:
    """Return 32 hex digits that nobody can guess and that sort by time."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def _now_s() -> int:
    return int(time.time())


@dataclass
class FileRecord:
    """A file."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int = field(default_factory=_now_s)
    expires_at: int | None = None
    status: str = "processed"
    object: str = "file"


@dataclass
class BatchRecord:
    """A batch."""

    id: str
    input_file_id: str
    endpoint: str
    metadata: Mapping[str, str] | None
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    status: str = "validating"
    model: str | None = None
    request_counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("total", "completed", "failed"), 0))
    errors: Mapping[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    object: str = "batch"

    def enter(self, status: str) -> None:
        """Set the status, and the time at which it was first reached."""
        self.status = status
        if getattr(self, f"{status}_at") is None:
            setattr(self, f"{status}_at", _now_s())


class BatchPlace(NamedTuple):
    """The paths of a batch."""

    owner: str  # the id of its client
    id: str

    @classmethod
    def at(cls, path: str) -> BatchPlace | None:
        """Return the place of an open batch by its path; None for any other path."""
        found = _OPEN.fullmatch(path)
        return None if found is None else cls(found[1], found[2])

    @property
    def open(self) -> str:
        """Its path until it has ended."""
        return f"open/{self.owner}.{self.id}"

    @property
    def ended(self) -> str:
        """Its path once it has ended."""
        return f"{self.owner}/batches/{self.id}"

    @property
    def created_s(self) -> float:
        """When it was created, from the start of its id."""
        return int(self.id[6:18], 16) / 1000
