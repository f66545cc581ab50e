"""What the pages say of policies, and of policies of your own: a documented one, and the example of a package."""

from __future__ import annotations

import re
import subprocess
import sys
from hashlib import md5
from pathlib import Path

import pytest
import yaml

from backends.backend import Backend
from backends.speculation import Method
from policies import policy as registry
from policies.build import build
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import policies, register
from policies.roles import assess, preview
from policies.rules.policy import ThresholdSettings
from tests.support.installed_module import installed
from tests.support.paths import DOCS

PAGE = "".join((DOCS / name).read_text("utf-8") for name in ("policies.md", "rules.md"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_documented_rules_are_valid() -> None:
    (example,) = (block for block in blocks("yaml") if "rules:" in block)
    settings = yaml.safe_load(example)["policy"]
    assert settings.pop("name") == "thresholds"
    assert len(ThresholdSettings.model_validate(settings).rules) == 5


def test_the_documented_custom_policy_is_one_small_file(tmp_path: Path) -> None:
    pool = [Backend(name, "m", Method.NGRAM, "http://127.0.0.1:1") for name in ("bb", "a", "ccc")]
    request = RequestFeatures("m", Endpoint.CHAT)
    with installed(tmp_path, "first_name", blocks("python")[0], "first_name = first_name"):
        kind = policies()["first_name"]
        policy = kind(kind.Settings())
        assert policy.choose(request, pool).backend == "a"
        assert [rating.backend for rating in assess(policy, request, pool)] == ["bb", "a", "ccc"]
        assert preview(policy, request, pool) == policy.choose(request, pool)


def test_two_policies_cannot_share_a_name() -> None:
    taken = policies()["round_robin"]
    with pytest.raises(ValueError, match="two policies are called 'round_robin'"):
        register(type("Other", (taken,), {}))
    assert policies()["round_robin"] is taken


def test_every_policy_is_documented() -> None:
    assert set(policies()) <= set(re.findall(r"^\| \[?`(\w+)`", PAGE, re.MULTILINE))


@pytest.mark.slow
def test_the_example_package_is_found_by_its_name_and_routes_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags, "--target", tmp_path, DOCS / "examples" / "policy-package"],
        check=True,
    )
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
