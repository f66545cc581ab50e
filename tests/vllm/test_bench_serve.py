"""`vllm bench serve` against the gateway, with simulated replicas: it needs vLLM for the tool only."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.launch.ports import free_port
from tests.clients.matrix import LOADS, gateway, run

pytestmark = pytest.mark.vllm


@pytest.mark.usefixtures("installed")
def test_it_reports_what_the_gateway_counts(tmp_path: Path) -> None:
    page_port = free_port()
    with gateway(tmp_path, page_port) as command:
        errors = {result.case: result.error for result in run(LOADS[0], command, page_port)}
    assert errors == {"completes": None, "tokens": None}
