"""The suite itself, as others run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .own_picker import MODEL
from .target import Target


@pytest.mark.parametrize(
    ("model", "status", "line"),
    [
        (MODEL, 0, "MUST   met        The picked endpoint is in the header"),
        ("no-such-model", 1, "MUST   NOT MET    The picked endpoint is in the header"),
    ],
)
def test_a_report_says_what_is_met(picker: Target, model: str, status: int, line: str) -> None:
    (_, key), *_ = picker.headers
    options = ["--target", picker.address, "--model", model, "--request-header", f"authorization={key}"]
    chosen = ["-p", "no:cacheprovider", str(Path(__file__).parent), "-k", "test_header or test_no_endpoint"]
    command = [sys.executable, "-m", "pytest", *chosen, *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == status, run.stdout + run.stderr
    assert line in run.stdout
    assert "give --empty-target or --empty-model" in run.stdout
