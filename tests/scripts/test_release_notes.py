"""`scripts/release-notes`: nothing is released whose version two places name differently."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

VERSIONED = ("pyproject.toml", "CHANGELOG.md", "deploy/helm/speculation-gateway/Chart.yaml", "scripts/release-notes")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of what names the version, made ready for 0.1.0 as CONTRIBUTING.md says."""
    for name in VERSIONED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = changelog.index("\n## ")
    notes = "\n## 0.1.0 (2026-12-01)\n\n### Fixed\n\n- A thing.\n\n## 0.0.9 (2026-11-01)\n\n- Another.\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog[:newest] + notes)
    edit(tmp_path / "pyproject.toml", current_version(), "0.1.0")
    edit(tmp_path / "deploy/helm/speculation-gateway/Chart.yaml", current_version(), "0.1.0")
    return tmp_path


def current_version() -> str:
    return (ROOT / "pyproject.toml").read_text().partition('\nversion = "')[2].partition('"')[0]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def notes(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(project / "scripts/release-notes"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_where_all_agree_it_prints_the_section_of_the_changelog(project: Path) -> None:
    done = notes(project, "v0.1.0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "### Fixed\n\n- A thing.\n", "")


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [
        ("pyproject.toml", 'version = "0.1.0"', 'version = "0.1.1"', "pyproject.toml says 0.1.1"),
        (VERSIONED[2], "\nversion: 0.1.0", "\nversion: 0.2.0", "version of the chart says 0.2.0"),
        (VERSIONED[2], "appVersion: 0.1.0", 'appVersion: "0.3.0"', "appVersion of the chart says 0.3.0"),
        ("CHANGELOG.md", "## 0.1.0", "## 0.4.0", "the first heading of CHANGELOG.md says 0.4.0"),
        ("CHANGELOG.md", "2026-12-01", "unreleased", "that heading has a date in the place of (unreleased)"),
    ],
)
def test_what_disagrees_is_named_and_nothing_else(project: Path, path: str, old: str, new: str, says: str) -> None:
    edit(project / path, old, new)
    done = notes(project, "v0.1.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"release-notes: v0.1.0 cannot be released: {says}\n"


def test_a_tag_begins_with_v(project: Path) -> None:
    assert notes(project, "0.1.0").stderr == "release-notes: 0.1.0 cannot be released: the tag is v0.1.0\n"
    assert notes(project).returncode == 1
