"""The default pool: one gateway process with five simulated replicas for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Command, gateway_command, until
from tests.support.paths import ROOT

MODEL = "llama-3.1-8b"


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    directory: Path = tmp_path_factory.mktemp("default-pool")
    with gateway_command(ROOT / "config" / "pool.yaml", directory) as command:
        until(lambda: command.get("/readyz").status_code == 200)
        yield command
