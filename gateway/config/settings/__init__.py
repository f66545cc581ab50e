"""The pool file as typed settings: each key, its meaning, its default and its constraints. One file a section.

The docstrings of the classes become the explanations in the JSON schema (`gateway.config.schema`).
"""

from gateway.config.settings.pool import (
    AdminSettings,
    BackendSettings,
    HealthSettings,
    KeySettings,
    ModelSettings,
    PolicyReference,
    PoolSettings,
    RecorderSettings,
    ServerSettings,
    ServeSettings,
    Settings,
    SimulateSettings,
    SloSettings,
    StateSettings,
    TimeoutSettings,
)

__all__ = [
    "AdminSettings",
    "BackendSettings",
    "HealthSettings",
    "KeySettings",
    "ModelSettings",
    "PolicyReference",
    "PoolSettings",
    "RecorderSettings",
    "ServeSettings",
    "ServerSettings",
    "Settings",
    "SimulateSettings",
    "SloSettings",
    "StateSettings",
    "TimeoutSettings",
]
