"""`vllm bench serve` against the gateway, with simulated replicas: it needs vLLM for the tool only."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from backends.launch.ports import free_port
from tests.clients.matrix import LOADS, pool_file, run, targets
from tests.support.command import gateway_command, until

pytestmark = pytest.mark.vllm


@pytest.mark.usefixtures("installed")
def test_it_reports_what_the_gateway_counts(tmp_path: Path) -> None:
    target, (tool, *_) = next(targets()), LOADS
    page_port = free_port()
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool_file(target, page_port)))
    with gateway_command(path, tmp_path) as command:
        until(lambda: command.get("/readyz").status_code == 200)
        errors = {result.case: result.error for result in run(tool, target, command, page_port)}
    assert {case: errors.get(case, "did not run") for case in ("completes", "tokens")} == {
        "completes": None,
        "tokens": None,
    }
