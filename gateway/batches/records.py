"""What is told of files and batches, in OpenAI's form."""

from __future__ import annotations

import time
from typing import Any, Final

Document = dict[str, Any]

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
WINDOW_S: Final = 24 * 3600
_TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def file_record(file_id: str, size_bytes: int, name: str, purpose: str) -> Document:
    """Return what is told of a file."""
    record = {"id": file_id, "object": "file", "bytes": size_bytes, "created_at": int(time.time())}
    return record | {"filename": name, "purpose": purpose, "status": "processed", "expires_at": None}


def new_batch(batch_id: str, endpoint: str, file_id: str, metadata: Document | None) -> Document:
    """Return what is told of a batch before it is run."""
    now_s = int(time.time())
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": endpoint,
        "model": None,
        "errors": None,
        "input_file_id": file_id,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now_s,
        "expires_at": now_s + WINDOW_S,
        **dict.fromkeys([f"{status}_at" for status in _TIMES]),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }


def problem(code: str, message: str, line: int | None = None, param: str | None = None) -> Document:
    """Return what is wrong with a batch, or with a line of it."""
    return {"code": code, "message": message, "param": param, "line": line}
