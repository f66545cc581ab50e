"""The pool file as typed settings: each key, its meaning, its default and its constraints. One file a section.

The sections of rooms are in `settings.py` of each. The docstrings of the classes become the explanations in the JSON
schema (`gateway.config.schema`).
"""

from gateway.config.settings.backend import BackendSettings
from gateway.config.settings.base import Section, Settings
from gateway.config.settings.discover import DiscoverSettings
from gateway.config.settings.keys import AdminSettings, KeySettings, SloSettings
from gateway.config.settings.model import ModelSettings, PolicyReference
from gateway.config.settings.pool import PoolSettings
from gateway.config.settings.server import ServerSettings, TimeoutSettings, TlsSettings
from gateway.config.settings.state import StateSettings
from gateway.config.settings.telemetry import OtlpSettings, TelemetrySettings

__all__ = [
    "AdminSettings",
    "BackendSettings",
    "DiscoverSettings",
    "KeySettings",
    "ModelSettings",
    "OtlpSettings",
    "PolicyReference",
    "PoolSettings",
    "Section",
    "ServerSettings",
    "Settings",
    "SloSettings",
    "StateSettings",
    "TelemetrySettings",
    "TimeoutSettings",
    "TlsSettings",
]
