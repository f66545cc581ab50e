"""The queries, settings and programs that the documentation shows."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from gateway.config.load import load_pool
from gateway.config.schema import pool_schema
from tests.support.deploy_tools import run
from tests.support.documentation import Block, blocks
from tests.support.paths import ROOT

NOT_OF_A_POOL = {
    "apiVersion",
    "apiGroups",
    "rules",
    "services",
    "scrape_configs",
    "groups",
    "static_resources",
    "model_list",
}
"""First keys of YAML that other programs read."""
NAMES = {"prompt_ids": list(range(100)), "output_ids": list(range(50))}
"""What the programs take for given."""


def test_queries_are_promql(tmp_path: Path) -> None:
    queries = blocks("promql")
    assert len(queries) >= 5
    rules = [{"record": f"query:{number}", "expr": query.text} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": rules}]}))
    run("promtool", "check", "rules", tmp_path / "rules.yaml")


def documents(block: Block) -> list[dict[str, Any]]:
    """Return the mappings of a block: one, or one a line where a page shows what can be chosen from."""
    lines = block.text.splitlines()
    first = {line.partition(":")[0] for line in lines if not line.startswith("#")}
    is_choice = len(first) == 1 and not any(line.startswith(" ") for line in lines)
    return [yaml.safe_load(text) for text in (lines if is_choice else [block.text])]


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_settings_are_valid(block: Block, tmp_path: Path) -> None:
    schema = pool_schema()
    sections = {**schema["properties"], "policy": {"$ref": "#/$defs/PolicyReference"}}
    for document in documents(block):
        if set(document) & NOT_OF_A_POOL or (block.page.startswith("deploy/") and not set(document) <= set(sections)):
            continue
        for key, value in document.items():
            if key == "models" and all("backends" in model and "policy" in model for model in value.values()):
                path = tmp_path / "pool.yaml"
                path.write_text(block.text)
                load_pool(path, {name: name for name in re.findall(r"\$\{(\w+)", block.text)})
            elif key == "models":
                part = {"properties": {**schema["$defs"]["ModelSettings"]["properties"]}, "additionalProperties": False}
                for model in value.values():
                    Draft202012Validator({**part, "$defs": schema["$defs"]}).validate(model)
            else:
                Draft202012Validator({**sections[key], "$defs": schema["$defs"]}).validate(value)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_programs_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if "await " in block.text or "@register" in block.text:
        return  # needs a running gateway; tests/policies runs the policy
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    shutil.copy(ROOT / "tests/data/AzureLLMInferenceTrace_code.csv", tmp_path / "traces")
    exec(code, dict(NAMES))
