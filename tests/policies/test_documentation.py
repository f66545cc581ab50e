from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from policies.policy import policies
from policies.rules.policy import ThresholdSettings
from tests.support.installed_module import installed
from tests.support.paths import DOCS

PAGE = "".join((DOCS / name).read_text("utf-8") for name in ("policies.md", "rules.md"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def own_policy(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, "first_name", blocks("python")[0], "first_name = first_name"):
        yield


def test_the_documented_rules_are_valid() -> None:
    (example,) = (block for block in blocks("yaml") if "rules:" in block)
    settings = yaml.safe_load(example)["policy"]
    assert settings.pop("name") == "thresholds"
    assert len(ThresholdSettings.model_validate(settings).rules) == 5


@pytest.mark.usefixtures("own_policy")
def test_the_documented_custom_policy_works() -> None:
    assert policies()["first_name"].__name__ == "FirstName"


def test_every_policy_is_documented() -> None:
    assert set(policies()) <= set(re.findall(r"^\| \[?`(\w+)`", PAGE, re.MULTILINE))
