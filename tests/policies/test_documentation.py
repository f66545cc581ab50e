"""What the pages say of policies, and of policies of your own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from backends.backend import Backend
from backends.speculation import Method
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
