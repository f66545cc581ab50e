"""Loading calibrations by name: from the package, from files, scaled, or of base engines."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from backends.calibration.base_engines import base_engines, base_models
from backends.calibration.calibration import Calibration
from backends.calibration.files import full_name, paths_from, read_calibration
from backends.calibration.scaling import base_calibration, scaled
from backends.validation import issues_of

_SHOWN_ISSUES: Final = 5


def load_calibration(name: str) -> Calibration:
    """Load a calibration from the package by name, or from a YAML file by path; a process reads each once.

    `NAME@GPU` and `NAME@GPU:PRECISION` are scaled by the data sheets; see `backends.calibration.scaling`.
    """
    return _loaded(full_name(name))


@cache
def _loaded(name: str, via: tuple[str, ...] = ()) -> Calibration:
    if name in via:
        raise ValueError(f"{name}: methods_from leads back to it")
    if name in base_engines():
        like = base_models()[base_engines()[name].model].like
        return base_calibration(name, _loaded(full_name(like)))
    source, at, machine = name.rpartition("@")
    if at and not name.endswith((".yaml", ".yml")):
        gpu, _, precision = machine.partition(":")
        calibration = _loaded(source, via)
        return scaled(calibration, gpu, precision or calibration.precision).model_copy(update={"name": name})
    read = read_calibration(name)
    problems, document = read.issues, read.data
    try:
        if isinstance(document, dict):
            document["name"] = name
            if isinstance(other := document.get("methods_from"), str) and isinstance(document.get("methods"), dict):
                with paths_from(Path(name).parent):
                    taken = _loaded(full_name(other), (*via, name)).taken_by_others()
                for method, own in document["methods"].items():
                    if method in taken and isinstance(own, dict) and "acceptance_like" not in own:
                        own.setdefault("acceptance", taken[method].acceptance)
                document["methods"] = taken | document["methods"]
        if not problems:
            return Calibration.model_validate(document)
    except ValidationError as error:
        problems = [(read.position(issue), issue) for issue in issues_of(error, Calibration)]
    reasons = "; ".join(f"line {position.line}: {issue}" for position, issue in problems[:_SHOWN_ISSUES])
    raise ValueError(f"{name}: not a calibration: {reasons}")
