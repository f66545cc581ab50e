"""Scripts that run the demo name options that it has."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from tests.support.paths import ROOT


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/take_screenshots.py"])
def test_the_options_are_there(script: str) -> None:
    (named,) = re.findall(r".*\bdemo\b.*--phases.*", (ROOT / script).read_text("utf-8"))
    shown = CliRunner().invoke(app, ["demo", "--help"]).output
    assert set(re.findall(r"--[a-z-]+", named)) <= set(re.findall(r"--[a-z-]+", shown))
