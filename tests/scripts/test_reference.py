"""The reference pages are what the code says, and their examples are valid."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.config.schema import pool_schema
from scripts.reference.__main__ import pages
from scripts.reference.metrics import metrics_page
from scripts.reference.pool_file import read_examples
from tests.support.paths import DOCS

SCHEMA = pool_schema()
SECTIONS: dict[str, dict[str, Any]] = {"PoolSettings": SCHEMA} | {
    name: definition for name, definition in SCHEMA["$defs"].items() if "properties" in definition
}


@pytest.mark.slow
def test_the_pages_are_up_to_date() -> None:
    stale = [path.name for path, text in pages().items() if path.read_text("utf-8") != text]
    assert not stale, "run scripts/docs"


def test_examples_are_valid_and_of_keys_that_exist() -> None:
    for name, examples in read_examples().items():
        for key, example in examples.items():
            child = SECTIONS[name]["properties"][key]
            Draft202012Validator({**child, "$defs": SCHEMA["$defs"]}).validate(example)
            assert example != child.get("default")


def test_series_that_come_and_go() -> None:
    page = (DOCS / "metrics.md").read_text("utf-8")
    row = next(line for line in page.splitlines(keepends=True) if line.startswith("| `gateway_peers` |"))
    gone = row.replace("gateway_peers", "gateway_gone")
    changed = metrics_page(page.replace(row, gone))
    assert "gateway_gone" not in changed
    assert row in changed.partition("## Others")[2]
