"""Folders of the project that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"
DATA = ROOT / "tests" / "data"
DOCS = ROOT / "docs"
