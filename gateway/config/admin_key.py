"""The admin key of a pool file that names none."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gateway.config.settings import AdminSettings, PoolSettings


def with_admin_key(settings: PoolSettings, environ: Mapping[str, str] = os.environ) -> PoolSettings:
    """Return the settings with `GATEWAY_ADMIN_KEY` as admin key, if they name none and it is not one of `keys`.

    A key of `keys` may do what its `admin` says, and no more.
    """
    given = AdminSettings.model_validate({"key": environ.get("GATEWAY_ADMIN_KEY")}).sha256
    if settings.admin.sha256 is not None or given is None or given in {key.sha256 for key in settings.keys}:
        return settings
    return settings.model_copy(update={"admin": settings.admin.model_copy(update={"sha256": given})})
