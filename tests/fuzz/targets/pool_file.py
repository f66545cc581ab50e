"""The pool file: any text gives valid settings or a `ConfigError` of bounded length, in bounded time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gateway.config.load import ConfigError, load_pool

SECRET = "sk-canary-0123456789"
_ENVIRON = {"SECRET": SECRET, "PORT": "9000", "EMPTY": ""}
_MESSAGE_CHARS = 200_000
_scratch = tempfile.TemporaryDirectory(prefix="fuzz-pool-")
_file = Path(_scratch.name) / "pool.yaml"


def fuzz_one(data: bytes) -> None:
    """Load a pool file."""
    _file.write_bytes(data)
    try:
        settings = load_pool(_file, _ENVIRON)
    except ConfigError as error:
        _check(str(error))
    else:
        assert settings.models


def _check(message: str) -> None:
    assert message
    assert len(message) < _MESSAGE_CHARS
