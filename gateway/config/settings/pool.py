"""The pool file, without the sections of rooms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from backends.validation import Issue
from gateway.config.checks import pool_issues
from gateway.config.settings.base import Name, Settings
from gateway.config.settings.clients import CorsSettings, PathPattern
from gateway.config.settings.keys import AdminSettings, KeySettings, SloSettings
from gateway.config.settings.model import ModelSettings
from gateway.config.settings.server import HealthSettings, ServerSettings, TimeoutSettings
from gateway.config.settings.state import State, StateSettings
from gateway.config.settings.telemetry import TelemetrySettings
from gateway.config.short_forms import written_out
from gateway.http.paths import DEFAULT_PATHS


def _named(keys: Any) -> Any:
    if not isinstance(keys, list):
        return keys
    return [
        key if isinstance(key, Mapping | KeySettings | list) else {"name": f"key-{number}", "key": key}
        for number, key in enumerate(keys, 1)
    ]


class PoolSettings(Settings):
    """The pool file. Top-level keys that begin with `x-` are ignored, for use as YAML anchors.

    Parameters
    ----------
    models
        The models by the name that clients use.
    keys
        API keys of clients. A plain string is a key for all models, named `key-N` by its position in the list. Without
        keys the gateway accepts every request.
    slo_classes
        Latency objectives by name, for keys (`slo_class`) and requests (`x-slo-class`). The dashboard and metrics show
        how many requests of each are served in time, and policies with the objective `goodput` use it.
    paths
        Paths that are relayed; a `*` at the end of one matches anything. Others are answered with 404. The default
        is the documented interface of vLLM.
    """

    model_config = ConfigDict(json_schema_extra={"patternProperties": {"^x-": {}}})

    server: ServerSettings = ServerSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    health: HealthSettings = HealthSettings()
    models: Annotated[dict[Name, ModelSettings], Field(min_length=1)]
    keys: Annotated[list[KeySettings], BeforeValidator(_named)] = []
    slo_classes: dict[Name, SloSettings] = {}
    admin: AdminSettings = AdminSettings()
    paths: list[PathPattern] = list(DEFAULT_PATHS)
    cors: CorsSettings | None = None
    state: State = StateSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return written_out({key: value for key, value in data.items() if not str(key).startswith("x-")})

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield conflicts between models, backends and keys."""
        yield from pool_issues(written_out(data))
