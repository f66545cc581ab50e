"""`scripts/audit`: the bill of materials, which needs no network, and its honesty where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PROXY = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / ".venv/bin/pip-audit").exists(), reason="needs the group audit: run scripts/audit once"
    ),
]


def audit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts/audit"), *arguments],
        env={**os.environ, **PROXY, "NO_PROXY": "", "no_proxy": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_bill_lists_what_is_shipped_and_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "sbom.json"
    done = audit("--offline", str(path))
    assert done.returncode == 0, done.stderr
    assert "not looked for" in done.stdout
    bill = json.loads(path.read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "speculation-gateway")
    listed = {component["purl"] for component in bill["components"]}
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    for name in ("fastapi", "uvicorn", "httptools", "redis", "starlette"):
        assert f"pkg:pypi/{name}@{pinned[name]}" in listed
    assert not [purl for purl in listed if "/pytest@" in purl or "/mypy@" in purl]


def test_without_the_vulnerability_service_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "sbom.json"
    done = audit(str(path))
    assert done.returncode != 0
    assert "did not answer" in done.stderr
    assert path.exists()
