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
    from gateway.config.settings import PoolSettings


def serve_pool(
    config: Path,
    server: Mapping[str, Any],
    of_command: Callable[[PoolSettings], Mapping[str, Any]] = lambda _: {},
) -> NoReturn:
    """Serve a pool file until a signal, and end the process; `of_command` returns sections for the command alone."""
    from gateway.gateway import rooms

    kinds, overrides = rooms(), {name: value for name, value in server.items() if value is not None}

    def load() -> PoolSettings:
        settings = read_pool(config)
        changed = {"server": settings.server.model_copy(update=overrides)}
        unasked = {kind.command_section: None for kind in kinds if kind.command_section}
        return settings.model_copy(update={**changed, **unasked, **of_command(settings)})

    settings = load()
    if any(backend.simulate for model in settings.models.values() for backend in model.backends.values()):
        require("simulator", "numba")
    if settings.telemetry.otlp is not None:
        require("otel", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    beside = [found for kind in kinds if (found := kind.beside(settings)) is not None]
    for section, tls in (("server", settings.server.tls), *((each.name, each.tls) for each in beside)):
        if tls is not None:
            from gateway.listening.certificate import Certificate

            Certificate(tls, f"{section}.tls")  # tells of its files now

    run_dir = Path(tempfile.mkdtemp(prefix="gateway-"))
    if settings.server.workers > 1:  # read by prometheus_client when it is imported
        metrics = run_dir / "metrics"
        metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    from gateway.service.run import serve

    background.end_process(serve(settings, config, load, run_dir))
