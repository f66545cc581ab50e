"""The pool file as typed settings: each key, its meaning, its default and its constraints. One file a section.

The docstrings of the classes become the explanations in the JSON schema (`gateway.config.schema`).
"""

from gateway.config.settings.backend import BackendSettings, ServeSettings, SimulateSettings
from gateway.config.settings.base import Settings
from gateway.config.settings.clients import CorsSettings
from gateway.config.settings.dashboard import DashboardSettings
from gateway.config.settings.discover import DiscoverSettings, InferencePoolSettings, KubernetesSettings
from gateway.config.settings.keys import AdminSettings, KeySettings, SloSettings
from gateway.config.settings.model import ModelSettings, PolicyReference
from gateway.config.settings.picker import PickerSettings
from gateway.config.settings.pool import PoolSettings
from gateway.config.settings.queue import QueueSettings
from gateway.config.settings.recorder import RecorderSettings
from gateway.config.settings.server import HealthSettings, ServerSettings, TimeoutSettings, TlsSettings
from gateway.config.settings.state import StateSettings
from gateway.config.settings.telemetry import OtlpSettings, TelemetrySettings

__all__ = [
    "AdminSettings",
    "BackendSettings",
    "CorsSettings",
    "DashboardSettings",
    "DiscoverSettings",
    "HealthSettings",
    "InferencePoolSettings",
    "KeySettings",
    "KubernetesSettings",
    "ModelSettings",
    "OtlpSettings",
    "PickerSettings",
    "PolicyReference",
    "PoolSettings",
    "QueueSettings",
    "RecorderSettings",
    "ServeSettings",
    "ServerSettings",
    "Settings",
    "SimulateSettings",
    "SloSettings",
    "StateSettings",
    "TelemetrySettings",
    "TimeoutSettings",
    "TlsSettings",
]
