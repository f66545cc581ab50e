"""The workflows, checked against the schema of GitHub."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.deploy_tools import ROOT, run

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_it_follows_the_schema_and_calls_scripts_that_exist(workflow: Path) -> None:
    assert "ok" in run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", workflow)
    text = workflow.read_text()
    scripts = re.findall(r"\bscripts/[\w-]+(?:\.txt)?", text)
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_wheels_are_built_for_the_versions_of_python_that_are_promised() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yaml").read_text())["jobs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert jobs["compiled"]["strategy"]["matrix"]["python"] == promised
    assert project["requires-python"] == f">={promised[0]}"
