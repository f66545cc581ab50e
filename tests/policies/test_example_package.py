"""The example package of a third party: installed with pip, found by its name, and built as a pool file has it."""

from __future__ import annotations

import subprocess
import sys
from hashlib import md5
from pathlib import Path

import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies import policy as registry
from policies.build import build
from policies.features.request import Endpoint, RequestFeatures
from policies.roles import assess
from tests.support.paths import DOCS

PACKAGE = DOCS / "examples" / "policy-package"


@pytest.mark.slow
def test_an_installed_module_routes_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", tmp_path, PACKAGE], check=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry.policies()))
    kind = registry.policies()["same_template"]
    policy = build("same_template", kind.Settings.model_validate({"most": 4, "guardrail": {"share": 0}}))
    pool = [Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1") for name in "abc"]
    templates = [md5(bytes([number % 9])).hexdigest()[:8] for number in range(90)]
    decisions = [policy.choose(RequestFeatures("m", Endpoint.CHAT, template=each), pool) for each in templates]
    assert {(decision.policy, decision.reason) for decision in decisions} == {("same_template", "template")}
    assert len({decision.backend for decision in decisions}) > 1
    assert all(one.backend == other.backend for one, other in zip(decisions, decisions[9:], strict=False))
    assert {rating.note for rating in assess(policy, RequestFeatures("m", Endpoint.CHAT), pool)} == {
        "not scored by this policy"
    }
