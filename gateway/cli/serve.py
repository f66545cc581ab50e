"""Serving a pool file, shared by the commands that do so."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from backends import background
from backends.files.own_folder import make_own
from gateway.cli.check import check_certificates, read_pool
from gateway.cli.extras import require

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings


def serve_pool(
    config: Path,
    server: Mapping[str, Any],
    of_command: Callable[[PoolSettings], Mapping[str, Any]] = lambda _: {},
) -> NoReturn:
    """Serve a pool file until a signal, then exit; `of_command` returns sections that only this command sets."""
    overrides = {name: value for name, value in server.items() if value is not None}
    of_file = read_pool(config)
    run_dir = Path(tempfile.gettempdir()) / f"gateway-{secrets.token_hex(4)}"
    metrics = run_dir / "metrics"
    if overrides.get("workers", of_file.server.workers) > 1:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)  # prometheus_client reads it when rooms import it
    from gateway.gateway import rooms

    kinds = rooms()

    def with_options(settings: PoolSettings) -> PoolSettings:
        changed = {"server": settings.server.model_copy(update=overrides)}
        unasked = {kind.command_section: None for kind in kinds if kind.command_section}
        return settings.model_copy(update={**changed, **unasked, **of_command(settings)})

    settings = with_options(of_file)
    if any(backend.simulate for model in settings.models.values() for backend in model.backends.values()):
        require("simulator", "numba")
    if settings.telemetry.otlp is not None:
        require("otel", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    check_certificates(settings)  # reports bad files now

    make_own(run_dir)
    if settings.server.workers > 1:
        make_own(metrics)
    from gateway.service.run import serve

    background.end_process(serve(settings, config, lambda: with_options(read_pool(config)), run_dir))
