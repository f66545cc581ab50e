"""The example package of a third party: installed with pip, named in a pool file, and asked by a real gateway."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.command import gateway_command, until
from tests.support.paths import DOCS, ROOT

PACKAGE = DOCS / "examples" / "policy-package"


def _chat(system: str) -> dict[str, object]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
    return {"model": "m", "messages": messages, "max_tokens": 4}


@pytest.mark.slow
def test_an_installed_module_routes_requests(tmp_path: Path) -> None:
    site = tmp_path / "site"
    flags = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", site, PACKAGE], check=True)
    backends = {
        name: {"method": "baseline", "simulate": {"calibration": "llama-3.1-8b-h100"}} for name in ("a", "b", "c")
    }
    policy = {"name": "same_template", "guardrail": {"share": 0.01}}
    pool = tmp_path / "pool.yaml"
    admin = {"key": "${GATEWAY_ADMIN_KEY}"}
    pool.write_text(yaml.safe_dump({"admin": admin, "models": {"m": {"policy": policy, "backends": backends}}}))
    path = os.pathsep.join([str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with gateway_command(pool, tmp_path, env={"PYTHONPATH": path}) as gateway:
        until(lambda: gateway.get("/readyz").status_code == 200)
        answers = [gateway.post("/v1/chat/completions", _chat("Be brief.")) for _ in range(12)]
        assert {answer.status_code for answer in answers} == {200}, gateway.printed()
        assert {answer.headers["x-gateway-policy"] for answer in answers} == {"same_template"}
        by_template = {
            answer.headers["x-gateway-backend"]
            for answer in answers
            if answer.headers["x-gateway-reason"] == "template"
        }
        assert len(by_template) <= 1  # none in a block of `least_loaded`
        explained = gateway.post("/admin/explain", _chat("Be brief."), headers=gateway.admin).json()
        assert explained["choice"]["policy"] == "same_template"
        assert explained["candidates"][0]["note"] == "not scored by this policy"
