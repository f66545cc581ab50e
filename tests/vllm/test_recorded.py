"""What a gateway recorded of real engines, replayed: each request to where it went, and what is said of its error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from benchmarks.vllm_cpu.prompts import pieces
from gateway.cli.app import app
from lab.trace.read import read_trace
from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import QUICK, Served, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]  # on a quiet machine only: the engines share its cores

POOL = "tests/vllm/pool.recorded.yaml"
AT_ONCE = (2, 4, 8, 16)  # on two replicas: 1 to 8 in flight at each
ROUNDS, EACH = 2, 48
LENGTHS = (24, 48, 80, 120)
REPLICAS = {
    "plain": '{method: baseline, url: "http://10.0.0.1:8000"}',
    "head": '{method: eagle, url: "http://10.0.0.2:8000", speculative_config: {num_speculative_tokens: 3}}',
}


def ask(served: Served, number: int, text: str) -> None:
    """Ask as an ordinary client does: seven in ten want a stream."""
    answer = served.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=LENGTHS[number % len(LENGTHS)],
        stream=number % 10 < 7,
    )
    for _ in answer:
        pass


@pytest.fixture(scope="module")
def records(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what was recorded of closed loops; the machine's speed may change meanwhile."""
    folder = tmp_path_factory.mktemp("recorded")
    with serve(folder, POOL, QUICK | {"RECORDS": str(folder / "records")}) as served:
        served.warm_up()
        served.openai.timeout = 600.0
        prompts, numbers = (text for text, _ in pieces()), count()
        for at_once in AT_ONCE * ROUNDS:
            with ThreadPoolExecutor(at_once) as threads:
                asked = [threads.submit(ask, served, next(numbers), text) for text in islice(prompts, EACH)]
                for one in asked:
                    one.result()
        wanted = EACH * len(AT_ONCE) * ROUNDS
        eventually_blocking(lambda: len(list(read_trace(folder / "records"))) >= wanted, 30.0, "all is recorded")
    return folder / "records"


def drift(records: Path) -> float:
    """Return by how much the machine's own speed differed between the rounds, which no replay can know."""
    in_order = sorted(read_trace(records), key=lambda one: one.arrived_at or 0.0)[-EACH * len(AT_ONCE) * ROUNDS :]
    e2e_s = np.array([one.e2e_s for one in in_order]).reshape(ROUNDS, len(AT_ONCE), EACH).sum(axis=(1, 2))
    return float(e2e_s.max() / e2e_s.min()) - 1.0


def test_replaying_the_past_gives_the_times_that_were_recorded(records: Path, tmp_path: Path) -> None:
    config, figures = tmp_path / "pool.yaml", tmp_path / "figures.json"
    backends = "".join(f"      {name}: {one}\n" for name, one in REPLICAS.items())
    config.write_text(f"models:\n  tiny:\n    policy: {{name: least_loaded}}\n    backends:\n{backends}")
    given = [str(records), "--config", str(config), "--json", str(figures)]
    result = CliRunner().invoke(app, ["replay", *given], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    past = orjson.loads(figures.read_bytes())["past"]
    assert set(past["replicas"]) == set(REPLICAS)
    bound = 0.10 + drift(records)
    for one in past["replicas"].values():
        assert one["requests"] > 30
        assert abs(one["error"]["e2e_s"]) < bound, past["said"]
        assert abs(one["error"]["tpot_s"]) < bound, past["said"]
