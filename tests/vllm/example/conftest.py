"""The example pool of four real vLLM engines, started once for all tests of this folder; the last one stops it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import CONFIG
from tests.vllm.conftest import EAGER, MODELS, Served, serve

BACKENDS = ("plain", "lookup", "head", "draft")


@pytest.fixture(scope="package")
def weights(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the weights of the head, which the last test replaces."""
    return shutil.copytree(MODELS / "eagle", tmp_path_factory.mktemp("head") / "eagle") / "model.safetensors"


@pytest.fixture(scope="package")
def served(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start the gateway with the example pool, with a copy of its head."""
    folder = tmp_path_factory.mktemp("example")
    text = (CONFIG / "pool.vllm-cpu.yaml").read_text()
    assert ".cache/tiny-models/eagle," in text
    (folder / "pool.yaml").write_text(text.replace(".cache/tiny-models/eagle", str(weights.parent)))
    with serve(folder, str(folder / "pool.yaml"), EAGER) as served:
        served.initial = served.predictions(messages=[{"role": "user", "content": "Hi"}], temperature=0)
        served.warm_up()
        yield served
