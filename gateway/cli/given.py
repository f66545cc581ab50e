"""Reads the input of a command: a file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from backends.files.regular import read_file
from backends.validation import UsageError


def read_given(name: str, most_bytes: int) -> bytes:
    """Return the bytes of a file, or of standard input for `-`; raise `UsageError` if it is unreadable or longer."""
    try:
        data = sys.stdin.buffer.read(most_bytes + 1) if name == "-" else read_file(Path(name), most_bytes)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from None
    if len(data) > most_bytes:
        raise UsageError(f"{name} has more than {most_bytes >> 20} MiB")
    return data
