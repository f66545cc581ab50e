"""Calibrations as YAML files: the package's by name, any other by its path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Final

from backends.calibration.base_engines import base_engines, base_models
from backends.files.regular import read_text
from backends.files.yaml import Document, read_yaml
from backends.validation import did_you_mean

_PACKAGE: Final = Path(__file__).with_name("data")
_MOST_BYTES: Final = 1 << 20
_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def paths_from(folder: Path) -> Iterator[None]:
    """Resolve relative paths of calibrations against the folder of the file that names them."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


@cache
def calibration_names() -> tuple[str, ...]:
    """Return the names of the calibrations in the package."""
    return tuple(sorted(path.stem for path in _PACKAGE.glob("*.yaml")))


def known_calibrations() -> str:
    """Return the available calibrations, in words."""
    engines, models = base_engines(), ", ".join(base_models())
    return (
        f"{', '.join(calibration_names())}; {len(engines)} base engines such as {next(iter(engines))}, of {models}; "
        "each by data sheets on as many other GPUs, NAME@GPU; or a file of `gateway calibrate`"
    )


def full_name(name: str) -> str:
    """Return the name of a calibration of the package unchanged, or a path made absolute.

    After `@` comes the GPU, and optionally the precision, to scale the calibration to.

    Examples
    --------
    >>> full_name("llama-3.1-8b-h100@B200:fp8")
    'llama-3.1-8b-h100@B200:fp8'
    """
    if name in calibration_names() or name in base_engines():
        return name
    if not name.endswith((".yaml", ".yml")):
        source, at, gpu = name.rpartition("@")
        if at and ("@" not in source or source.endswith((".yaml", ".yml"))):
            return f"{full_name(source)}@{gpu}"
        hint = did_you_mean(name, [*base_engines(), *calibration_names()])
        hint = f"known here: {known_calibrations()}" if hint.startswith("known") else hint
        raise ValueError(f"no calibration is called {name[:80]!r}; {hint}")
    return os.path.abspath((_FOLDER.get() or Path()) / name)


def read_calibration(name: str) -> Document:
    """Return the content of the file with a full name."""
    path = _PACKAGE / f"{name}.yaml" if name in calibration_names() else Path(name)
    try:
        return read_yaml(read_text(path, _MOST_BYTES), {})
    except OSError as error:
        raise ValueError(f"{name}: cannot read the calibration: {error.strerror}") from None


def context_shift(name: str) -> object:
    """Return a named shift of acceptance by context from context_shifts.yaml."""
    known: dict[str, object] = read_yaml((_PACKAGE.parent / "context_shifts.yaml").read_text("utf-8"), {}).data
    if name not in known:
        raise ValueError(f"no shift by context is called {name!r}; {did_you_mean(name, known)}")
    return known[name]
