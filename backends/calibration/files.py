"""Calibrations as YAML files: those of the package, by name, and any other, by its path."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from backends.validation import did_you_mean

_MOST_BYTES: Final = 1 << 20
_MOST_NODES: Final = 20_000  # nested aliases can expand a short file exponentially
_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def paths_from(folder: Path) -> Iterator[None]:
    """Have relative paths of calibrations start at a folder: that of the file which names them."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


@cache
def calibration_names() -> tuple[str, ...]:
    """Return the names of the calibrations in the package."""
    folder = resources.files("backends.calibration").joinpath("data")
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def full_name(name: str) -> str:
    """Return the name of a calibration of the package as it is, and a path, which stands for a name, in full."""
    if name in calibration_names():
        return name
    if not name.endswith((".yaml", ".yml")):
        known = did_you_mean(name, calibration_names())
        raise ValueError(f"no calibration is called {name!r}; {known}, or give the path of a YAML file")
    return os.path.abspath((_FOLDER.get() or Path()) / name)


def read_calibration(name: str) -> tuple[Any, yaml.Node]:
    """Return the content of the file of a full name, and where its parts are."""
    if name in calibration_names():
        text = resources.files("backends.calibration").joinpath("data", f"{name}.yaml").read_text(encoding="utf-8")
    else:
        text = _text(name)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None or _size(node, {}) > _MOST_NODES:
            raise ValueError(f"{name}: {'empty' if node is None else 'too large'} for a calibration")
        return loader.construct_document(node), node
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: not YAML: {' '.join(str(error).split())}") from None


def context_shift(name: str) -> object:
    """Return a shift of acceptance by context that context_shifts.yaml has for calibrations to name."""
    file = resources.files("backends.calibration").joinpath("context_shifts.yaml")
    known: dict[str, object] = yaml.safe_load(file.read_text(encoding="utf-8"))
    if name not in known:
        raise ValueError(f"no shift by context is called {name!r}; {did_you_mean(name, known)}")
    return known[name]


def line_of(node: yaml.Node, path: tuple[str | int, ...]) -> int:
    """Return the line, counted from 1, of what a path leads to, or of its nearest parent in the file."""
    line = node.start_mark.line
    for step in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((key, value) for key, value in pairs if key.value == step), None)
        if found is None:
            break
        line, node = found[0].start_mark.line, found[1]
    return int(line) + 1


def _text(path: str) -> str:
    """Return the text of a file. A FIFO, or a device, is not waited for."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{path}: not a regular file")
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"{path}: larger than {_MOST_BYTES >> 20} MiB; not a calibration")
        return data.decode()
    except OSError as error:
        raise ValueError(f"{path}: cannot read the calibration: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8; save the calibration as UTF-8") from None


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of nodes below one, with aliases as often as they are used."""
    if id(node) not in known:
        known[id(node)] = _MOST_NODES  # of an alias inside its own anchor
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = (part for item in parts for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = 1 + sum(_size(part, known) for part in below)
    return known[id(node)]
