"""Values that a shell completes: models of the pool file, policies and calibrations."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer


def models(context: typer.Context, incomplete: str) -> list[str]:
    """Return the models of the pool file that is given, or else of the default one; none if it cannot be read."""
    from gateway.config.yaml import read_yaml

    path = context.params.get("config") or context.find_root().params["config"]
    try:
        data = read_yaml(Path(path).read_text("utf-8"), {}).data
    except (OSError, UnicodeDecodeError):
        return []
    found = data.get("models") if isinstance(data, dict) else None
    return _beginning(incomplete, found if isinstance(found, dict) else ())


def policies(incomplete: str) -> list[str]:
    """Return the names of policies."""
    from policies.policy import policies as registered

    return _beginning(incomplete, registered())


def calibrations(incomplete: str) -> list[str]:
    """Return the names of calibrations."""
    from backends.calibration.calibration import calibration_names

    return _beginning(incomplete, calibration_names())


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
