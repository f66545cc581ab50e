"""The example pool of four real vLLM engines, started once for all tests of this folder; the last one stops it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import EAGER, Served, serve

POOL = "config/pool.vllm-cpu.yaml"


@pytest.fixture(scope="package")
def served(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start the gateway with the example pool."""
    with serve(tmp_path_factory.mktemp("example"), POOL, EAGER) as served:
        served.initial = served.predictions(messages=[{"role": "user", "content": "Hi"}], temperature=0)
        served.warm_up()
        yield served
