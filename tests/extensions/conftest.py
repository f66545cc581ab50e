"""The C extensions, built as for the wheel."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the built modules."""
    compiler = shlex.split(str(sysconfig.get_config_var("CC")))[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"needs the C compiler {compiler!r}: scripts/test installs it (scripts/apt-packages.txt)")
    built = tmp_path_factory.mktemp("extensions")
    command = [sys.executable, str(ROOT / "scripts" / "build_extensions.py"), str(built)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout
    return built


@pytest.fixture(scope="session")
def suffix(folder: Path) -> ModuleType:
    """Return `backends.drafting._suffix`."""
    return _module(folder, "backends.drafting._suffix")


@pytest.fixture(scope="session")
def tail(folder: Path) -> ModuleType:
    """Return `policies.features._tail`."""
    return _module(folder, "policies.features._tail")


@pytest.fixture(scope="session")
def units(folder: Path) -> ModuleType:
    """Return `gateway.rooms.recorder._units`."""
    return _module(folder, "gateway.rooms.recorder._units")


def _module(folder: Path, name: str) -> ModuleType:
    file = folder.joinpath(*name.split(".")).with_suffix(str(sysconfig.get_config_var("EXT_SUFFIX")))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
