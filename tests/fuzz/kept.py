"""The targets, and the inputs that are kept for them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
TARGETS = ("requests", "answers", "events", "bodies", "pool_file", "traces", "records")


def inputs(target: str) -> list[Path]:
    """Return the files of a target's corpus."""
    return sorted((CORPUS / target).iterdir())
