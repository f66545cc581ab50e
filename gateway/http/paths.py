"""The paths that the gateway answers itself; all others are relayed."""

from __future__ import annotations

_OWN = frozenset({"/health", "/readyz", "/metrics", "/v1/models", "/admin"})


def is_own(path: str) -> bool:
    """Return whether the gateway answers a path itself.

    Examples
    --------
    >>> is_own("/v1/models/llama"), is_own("/v1/completions")
    (True, False)
    """
    return path in _OWN or path.startswith(("/admin/", "/v1/models/"))
