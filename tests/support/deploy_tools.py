"""The real tools that check what is in deploy/."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"


def tool(name: str) -> str:
    """Return where a command is: in this environment, or on PATH."""
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    assert found, f"these tests need {name!r}: scripts/test installs it (see scripts/apt-packages.txt, pyproject.toml)"
    return found


def run(*argv: str | Path, cwd: Path = ROOT) -> str:
    """Run a tool, which must succeed, and return all that it printed."""
    done = subprocess.run(
        [tool(str(argv[0])), *map(str, argv[1:])],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, argv))} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
