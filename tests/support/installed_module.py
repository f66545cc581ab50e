"""A third-party module with an entry point, installed into a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policies import policy as registry


@contextmanager
def installed(folder: Path, module: str, source: str, entry: str, group: str = registry.ENTRY_POINTS) -> Iterator[None]:
    """Install a module with the entry point `entry = module`, and remove it at the end."""
    (folder / f"{module}.py").write_text(source, "utf-8")
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", "utf-8")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry}\n", "utf-8")
    before = dict(registry.policies())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        try:
            yield
        finally:
            registry._REGISTRY.clear()
            registry._REGISTRY.update(before)
            sys.modules.pop(module, None)
