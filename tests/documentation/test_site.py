"""The site is built strictly, and its navigation is that of docs/index.md."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import DOCS, ROOT

pytestmark = pytest.mark.slow

INDEX = """\
# Home

## Begin

- [First page](page.md): what it says
- [Change](../CHANGELOG.md)
<!-- - [Later](later.md) -->
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with a documentation of three pages, and the configuration of the real one."""
    shutil.copytree(DOCS / "site", tmp_path / "docs/site")
    (tmp_path / "docs/index.md").write_text(INDEX)
    (tmp_path / "docs/page.md").write_text("# A page\n\n## Part one\n\n[up](index.md#begin), [index.md](index.md)\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    return tmp_path


def build(source: Path) -> subprocess.CompletedProcess[str]:
    options = ["-q", "--fail-on-warning", "--keep-going", "-c", "docs/site", ".", "out"]
    command = [sys.executable, "-m", "sphinx", *options]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60, check=False)


def test_what_is_broken_fails_the_build(source: Path) -> None:
    page = source / "docs/page.md"
    wrong = ["[a](none.md)", "[b](index.md#none)", "[c](none.txt)", "[d](../gateway/none.py)", "![e](none.png)"]
    page.write_text(page.read_text() + "\n".join(wrong))
    (source / "docs/unlisted.md").write_text("# A page that the index does not list\n")
    done = build(source)
    assert done.returncode
    for told in (
        "'none.md'",
        "'docs/index': 'none'",
        "'none.txt'",
        "none.py'",
        "none.png",
        "unlisted.md: WARNING",
    ):
        assert told in done.stderr


def test_every_page_is_listed_or_waits_in_a_comment() -> None:
    assert (ROOT / "scripts/docs-site").stat().st_mode & 0o100
    index = (DOCS / "index.md").read_text("utf-8")
    assert [page.name for page in DOCS.glob("*.md") if f"]({page.name})" not in index] == ["index.md"]
