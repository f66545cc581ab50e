"""Limits that depend on each other in the pool file."""

from __future__ import annotations

from gateway.config.settings import HealthSettings, ServerSettings
from gateway.importer.configuration import Configuration


def set_body_limit(configuration: Configuration, mib: float) -> None:
    """Bound the bodies of requests, and all unfinished ones together by no less."""
    configuration.put("server", "max_body_mib", round(mib, 3))
    if mib > ServerSettings().max_unfinished_mib:
        configuration.put("server", "max_unfinished_mib", round(mib, 3))


def set_ejection(configuration: Configuration, eject_s: float) -> None:
    """Set the seconds of the first ejection, and of the longest to no less."""
    configuration.put("health", "eject_s", eject_s)
    if eject_s > HealthSettings().eject_max_s:
        configuration.put("health", "eject_max_s", eject_s)
