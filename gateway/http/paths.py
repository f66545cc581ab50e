"""Which paths the gateway answers itself; all others are the relay's."""

from __future__ import annotations

_OWN = frozenset({"/health", "/readyz", "/metrics", "/v1/models", "/admin"})


def is_own(path: str) -> bool:
    """Tell whether the gateway answers a path itself."""
    return path in _OWN or path.startswith(("/admin/", "/v1/models/"))
