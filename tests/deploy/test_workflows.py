"""The workflows: GitHub's schema, an audit of what they may do, and that a release has what is promised."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.support.deploy_tools import run
from tests.support.helm_chart import CHART, pod, render
from tests.support.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


def jobs(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yaml").read_text())["jobs"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_it_follows_the_schema_and_calls_scripts_that_exist(workflow: Path) -> None:
    assert "ok" in run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", workflow)
    text = workflow.read_text()
    scripts = re.findall(r"\bscripts/[\w-]+(?:\.txt)?", text)
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_an_audit_finds_nothing() -> None:
    """Pins that can move, credentials left behind, text of others in a shell, permissions that are not needed."""
    assert "No findings" in run("zizmor", "--offline", "--no-progress", *WORKFLOWS)


def test_one_job_of_a_release_may_write_and_only_after_all_others_have_passed() -> None:
    release = jobs("release")
    assert [name for name, job in release.items() if "permissions" in job] == ["draft"]
    assert set(release["draft"]["needs"]) == set(release) - {"draft"}
    assert all(job["needs"] == "notes" for name, job in release.items() if name not in {"notes", "draft"})
    assert "secrets." not in (ROOT / ".github/workflows/release.yaml").read_text()


def test_wheels_are_built_for_the_versions_of_python_that_are_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert jobs("release")["compiled"]["strategy"]["matrix"]["python"] == promised
    assert jobs("ci")["test"]["strategy"]["matrix"]["python"] == promised
    assert project["requires-python"] == f">={promised[0]}"


def test_the_chart_of_a_release_names_its_image(tmp_path: Path) -> None:
    script = next(step["run"] for step in jobs("release")["chart"]["steps"] if "run" in step)
    shutil.copytree(CHART, tmp_path / CHART.relative_to(ROOT))
    prepare = [line for line in script.splitlines() if not line.startswith("helm ")]
    owner = {"GITHUB_REPOSITORY_OWNER": "Some-Owner", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-euc", "\n".join(prepare)], cwd=tmp_path, env=owner, check=True)
    with helm.Chart.load(helm.package(tmp_path / CHART.relative_to(ROOT), destination=tmp_path)) as chart:
        image = pod(render(chart, {})["Deployment", "pool-speculation-gateway"])["containers"][0]["image"]
        assert image == f"ghcr.io/some-owner/speculation-gateway:{chart.version}"
