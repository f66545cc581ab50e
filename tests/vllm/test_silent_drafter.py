"""A real EAGLE head that a restart replaces with one of random weights: noticed, named and avoided."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import START_S, Served
from tests.vllm.requests import drafts, to

pytestmark = pytest.mark.vllm

POOL = ""
MODELS = ROOT / ".cache/tiny-models"
VICTIM, STEADY = "head", "steady"
TOKENS = 48
FOUND_WITHIN = 15
"""Answers of the broken replica within which it is found; at least 6 are needed."""


@pytest.fixture(scope="module", autouse=True)
def weights(request: pytest.FixtureRequest, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pool of two replicas with the trained head, and return the weights that one of them loads at start."""
    folder = tmp_path_factory.mktemp("silent")
    shutil.copytree(MODELS / "eagle", folder / "eagle")
    pool = yaml.safe_load((ROOT / "tests/vllm/pool.methods.yaml").read_text())
    tiny = pool["models"]["tiny"]
    serve = tiny["backends"]["head3"]["serve"]
    tiny["backends"] = {
        name: {
            "method": "eagle",
            "serve": serve,
            "speculative_config": {"model": str(model), "num_speculative_tokens": 3},
        }
        for name, model in ((VICTIM, folder / "eagle"), (STEADY, MODELS / "eagle"))
    }
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump(pool))
    request.module.POOL = str(path)
    return folder / "eagle/model.safetensors"


def randomise(path: Path) -> None:
    """Replace all weights of a safetensors file by random ones of the same types."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    rng = np.random.default_rng(0)
    body = bytearray(content[8 + length :])
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        start, end = tensor["data_offsets"]
        count = int(np.prod(tensor["shape"]))
        values = rng.normal(0.0, 0.1, count).astype(np.float32)
        if tensor["dtype"] == "BF16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)  # type: ignore[assignment]
        body[start:end] = values.tobytes()
    path.write_bytes(content[: 8 + length] + body)


def ask(served: Served, number: int, temperature: float = 0.0, backend: str | None = None) -> tuple[str, float]:
    """Return the backend of an answer and its tokens per step."""
    raw = served.openai.chat.completions.with_raw_response.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "You write Python."},
            {"role": "user", "content": f"Write function number {number} of Python's heapq."},
        ],
        temperature=temperature,
        max_tokens=TOKENS,
        extra_headers=to(backend) if backend else {},
        extra_body={"ignore_eos": True},
    )
    return raw.headers["x-gateway-backend"], TOKENS / (TOKENS - drafts(raw.parse())["num_accepted_draft_tokens"])


def test_a_head_that_a_restart_has_broken_is_avoided(served: Served, weights: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        before = list(threads.map(lambda number: ask(served, number, backend=[VICTIM, STEADY][number % 2]), range(48)))
    process = served.backends()[VICTIM]["pid"]
    randomise(weights)
    os.killpg(os.getpgid(process), signal.SIGKILL)
    eventually_blocking(lambda: served.backends()[VICTIM]["state"] != "up")
    hot = [ask(served, number, 1.0, STEADY) for number in range(12)]  # changed traffic, while the other one starts
    eventually_blocking(lambda: served.backends()[VICTIM]["state"] in {"up", "recovering"}, START_S)

    broken: list[float] = []
    while not served.backends()[VICTIM]["drafter_silent"]:
        assert len(broken) < FOUND_WITHIN, broken
        with ThreadPoolExecutor(2) as threads:
            # Two are pinned: the policy may prefer the other one, which has the prompts cached.
            answers = list(
                threads.map(lambda number: ask(served, number, backend=VICTIM if number < 2 else None), range(4))
            )
        broken += [per_step for backend, per_step in answers if backend == VICTIM]
    silence = served.backends()[VICTIM]["drafter_silent"]
    assert silence["cause"] == "since_restart"
    line = f"{VICTIM} does otherwise than it did: its drafter is silent since restart"
    assert served.log_path.read_text().count(line) == 1
    candidates = served.explain(messages=[{"role": "user", "content": "Hi"}], temperature=0)["candidates"]
    notes = {each["backend"]: each["note"] for each in candidates}
    assert "silent since restart" in notes[VICTIM]
    assert "silent" not in notes[STEADY]

    with ThreadPoolExecutor(2) as threads:
        after = list(threads.map(lambda number: ask(served, number), range(24)))
        hot += threads.map(lambda number: ask(served, number, 1.0, STEADY), range(12))
    shares = [sum(backend == VICTIM for backend, _ in answers) / len(answers) for answers in (before, after)]
    means = [np.mean([per_step for _, per_step in answers]) for answers in (before, hot)]
    print(
        f"\ntokens per step: {means[0]:.2f} before, {np.mean(broken):.2f} of the broken head, "
        f"{means[1]:.2f} of the other at temperature 1; found after {len(broken)} answers of the broken "
        f"one, which then got {shares[1]:.0%} of the requests; {silence}"
    )
    assert shares[1] <= 0.25
    assert served.backends()[STEADY]["drafter_silent"] is None

    def gauge(backend: str, cause: str) -> float:
        return served.metric("gateway_backend_drafter_silent", backend=backend, cause=cause)

    eventually_blocking(lambda: gauge(VICTIM, "since_restart") == 1)
    assert gauge(VICTIM, "unknown") == gauge(STEADY, "since_restart") == gauge(STEADY, "unknown") == 0
