"""Serving a pool file, as the commands that do it share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from backends import background
from gateway.cli.check import read_pool
from gateway.cli.extras import require

if TYPE_CHECKING:
    from gateway.config.settings import PickerSettings, PoolSettings
    from gateway.service.server import MakeCompanion


def serve_pool(
    config: Path,
    server: Mapping[str, Any],
    picker: Mapping[str, Any] | None = None,
    companion: Callable[[], MakeCompanion] | None = None,
) -> NoReturn:
    """Serve a pool file until a signal, and end the process; `companion` imports what is served beside it."""
    overrides = {name: value for name, value in server.items() if value is not None}

    def load() -> PoolSettings:
        settings = read_pool(config)
        changed = {"server": settings.server.model_copy(update=overrides), "picker": None}
        return settings.model_copy(update=changed | ({} if picker is None else {"picker": _picker(settings, picker)}))

    settings = load()
    if any(backend.simulate for model in settings.models.values() for backend in model.backends.values()):
        require("simulator", "numba")
    if settings.telemetry.otlp is not None:
        require("otel", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    if picker is not None:
        require("picker", "grpc_health", "google.protobuf")

    for section, of in (("server", settings.server), ("picker", settings.picker)):
        if of is not None and of.tls is not None:
            from gateway.listening.certificate import Certificate

            Certificate(of.tls, f"{section}.tls")  # tells of its files now

    run_dir = Path(tempfile.mkdtemp(prefix="gateway-"))
    if settings.server.workers > 1:  # read by prometheus_client when it is imported
        metrics = run_dir / "metrics"
        metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    from gateway.service.run import serve

    background.end_process(serve(settings, config, load, run_dir, None if companion is None else companion()))


def _picker(settings: PoolSettings, overrides: Mapping[str, Any]) -> PickerSettings:
    from gateway.config.settings import PickerSettings

    known = PickerSettings() if settings.picker is None else settings.picker
    return known.model_copy(update={name: value for name, value in overrides.items() if value is not None})
