"""The reference pages are what the code says, and their examples are valid."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.config.schema import pool_schema
from scripts.reference.__main__ import pages
from scripts.reference.metrics import metrics_page
from scripts.reference.pool_file import examples_of, read_examples
from tests.support.paths import DOCS

SCHEMA = pool_schema()
SECTIONS: dict[str, dict[str, Any]] = {"PoolSettings": SCHEMA} | {
    name: definition for name, definition in SCHEMA["$defs"].items() if "properties" in definition
}


@pytest.mark.slow
def test_the_pages_are_up_to_date() -> None:
    stale = [path.name for path, text in pages().items() if path.read_text("utf-8") != text]
    assert not stale, "run scripts/docs"


@pytest.mark.parametrize("name", SECTIONS)
def test_each_key_has_a_valid_example(name: str) -> None:
    examples = examples_of(name, read_examples())
    for key, child in SECTIONS[name]["properties"].items():
        if "const" not in child:
            assert key in examples, f"add an example of {name}.{key} to scripts/reference/examples.yaml"
            Draft202012Validator({**child, "$defs": SCHEMA["$defs"]}).validate(examples[key])
            assert examples[key] != child.get("default")


def test_no_example_is_of_a_key_that_is_gone() -> None:
    for name, examples in read_examples().items():
        assert name == "EveryPolicy" or examples.keys() <= SECTIONS[name]["properties"].keys()


def test_series_that_come_and_go() -> None:
    page = (DOCS / "metrics.md").read_text("utf-8")
    row = next(line for line in page.splitlines(keepends=True) if line.startswith("| `gateway_peers` |"))
    gone = row.replace("gateway_peers", "gateway_gone")
    changed = metrics_page(page.replace(row, gone))
    assert "gateway_gone" not in changed
    assert row in changed.partition("## Others")[2]
