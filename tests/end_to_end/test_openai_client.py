"""The official clients of OpenAI and Anthropic against the default pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.end_to_end.conftest import MODEL
from tests.support.command import Command
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("script", ["openai_python", "anthropic_python"])
def test_the_cases_of_official_clients(gateway: Command, script: str) -> None:
    environ = {"CLIENTS_URL": gateway.url, "CLIENTS_MODEL": MODEL, "CLIENTS_KEY": "none", "CLIENTS_LIMITED_KEY": "none"}
    done = subprocess.run(
        [sys.executable, "-P", ROOT / f"tests/clients/cases/{script}.py"],
        env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    cases = {each["case"]: each["error"] for each in map(json.loads, done.stdout.splitlines()[1:])}
    of_keys = {"wrong key", "retry after 429"}  # which this pool has none of
    assert {"chat", "unknown model", "stream", "tools", "models"} <= cases.keys()
    assert {name: error for name, error in cases.items() if error and name not in of_keys} == {}
