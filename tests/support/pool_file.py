"""Pool files for gateways that run as processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

NOWHERE = "http://127.0.0.1:9"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def write_pool(path: Path, urls: Mapping[str, str], *, policy: str = "round_robin", **sections: Any) -> Path:
    """Write a pool file with a model `m`, of which a baseline answers at each of these URLs."""
    backends = {name: {"method": "baseline", "url": url} for name, url in urls.items()}
    model = {"policy": {"name": policy}, "default_temperature": 1.0, "backends": backends}
    path.write_text(yaml.safe_dump({"models": {"m": model}, **sections}))
    return path
