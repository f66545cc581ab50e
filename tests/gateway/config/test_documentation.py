"""docs/configuration.md has every section, and what it shows is so. docs/reference has every key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backends.speculation import Method, SpeculativeConfig
from gateway.config.load import ConfigError, load_pool
from gateway.config.pool_file import PoolFile
from gateway.config.schema import pool_schema
from tests.support.paths import DOCS

PAGE = (DOCS / "configuration.md").read_text("utf-8")


def test_every_top_level_key() -> None:
    headings = " ".join(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    assert all(f"`{name}`" in headings for name in PoolFile.model_fields)


def test_every_method() -> None:
    assert all(f"`{method}`" in PAGE for method in Method)


def test_every_named_key_of_the_speculative_config_exists() -> None:
    named = set(re.findall(r"\b(?:num_speculative|prompt_lookup|suffix_decoding|parallel)_[a-z_]+", PAGE))
    assert named
    assert named <= set(SpeculativeConfig.model_fields)


WRONG = """\
models:
  llama:
    policy: {name: thresholds}
    backends:
      plain:
        metod: baseline
        url: http://10.0.0.1:8000/v1
      head:
        method: eagle
        serve: {model: meta-llama/Llama-3.1-8B-Instruct}
        speculative_config: {num_speculative_tokens: 3}
"""


def test_the_errors_shown_are_those_reported(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```\n(config/pool.yaml:.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "pool.yaml"
    path.write_text(WRONG)
    with pytest.raises(ConfigError) as caught:
        load_pool(path, {})
    assert str(caught.value).replace(str(path), "config/pool.yaml") + "\n" == shown


def test_every_key_of_a_section_has_its_meaning() -> None:
    sections = {name: each["properties"] for name, each in pool_schema()["$defs"].items() if name.endswith("Settings")}
    bare = [f"{name}.{key}" for name in sections for key in sections[name] if "description" not in sections[name][key]]
    assert "CompareSettings" in sections
    assert bare == []
