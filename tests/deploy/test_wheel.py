"""The sdist and the pure wheel: complete and equal. `scripts/check-deploy` installs a wheel, and goes on from there."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gateway import __version__
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PACKAGES = ("backends", "policies", "gateway", "lab")
NAME = f"speculation_gateway-{__version__}"


def python(*arguments: str | Path, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both."""
    folder = tmp_path_factory.mktemp("built")
    python("-m", "hatchling", "build", "-d", folder)
    assert {path.name for path in folder.iterdir()} == {f"{NAME}.tar.gz", f"{NAME}-py3-none-any.whl"}
    return folder


def wheel_of(folder: Path) -> Path:
    return folder / f"{NAME}-py3-none-any.whl"


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(built: Path) -> None:
    """Whatever its kind: a data file of a new kind needs no entry anywhere."""
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith(f"{NAME}.dist-info/")}
        files = {
            str(path.relative_to(ROOT)): path
            for package in PACKAGES
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
        }
        assert names == set(files)
        assert wheel.read("gateway/config/pool.yaml") == (ROOT / "config/pool.yaml").read_bytes()  # in git a link
        assert wheel.read(f"{NAME}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_builds_to_the_same_wheel(built: Path, tmp_path: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        sdist.extractall(tmp_path, filter="data")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tmp_path / NAME)
    assert wheel_of(tmp_path).read_bytes() == wheel_of(built).read_bytes()
