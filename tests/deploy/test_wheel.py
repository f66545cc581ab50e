"""The sdist and the pure wheel: complete, equal, and installed.

`scripts/check-deploy` serves requests from an installed wheel, with the dependencies that it resolves to.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.metadata import Metadata

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


@pytest.mark.slow
def test_the_sdist_builds_to_the_same_wheel(built: Path, tmp_path: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        sdist.extractall(tmp_path, filter="data")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tmp_path / NAME)
    assert wheel_of(tmp_path).read_bytes() == wheel_of(built).read_bytes()


def test_its_metadata_are_valid(built: Path) -> None:
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        metadata = Metadata.from_email(wheel.read(f"{NAME}.dist-info/METADATA"), validate=True)
    assert metadata.description == (ROOT / "README.md").read_text()
    assert metadata.license_expression == "Apache-2.0"
    assert {"simulator", "lab", "redis", "discovery", "vllm", "all"} <= set(metadata.provides_extra or ())


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, used in an empty folder."""

    command: Path
    folder: Path

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.command, *arguments], cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return an environment of its own, whose dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    site_packages.joinpath("dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python("-m", "pip", "--python", folder / "venv", "install", "--quiet", "--no-deps", "--no-index", wheel_of(built))
    (folder / "empty").mkdir()
    return Installed(folder / "venv/bin/gateway", folder / "empty")


@pytest.mark.slow
def test_the_installed_command_goes_from_nothing_to_a_checked_pool(installed: Installed) -> None:
    assert installed.run("--version") == f"gateway {__version__}\n"
    assert installed.run("init").startswith("Wrote config/pool.yaml")
    assert installed.run("check").count("simulated") == 5
    assert "replay" in installed.run("--help")
    where = "import gateway; print(gateway.__file__)"
    done = subprocess.run(
        [installed.command.parent / "python", "-c", where],
        cwd=installed.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(installed.command.parents[1]))
