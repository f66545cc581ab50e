"""`gateway tune --schedule`: what k a replica should have, by its load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import yaml

from backends.speculation import SCHEDULE_KEY, Method
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.table import request_table
from lab.trace.record import TraceRecord
from lab.trace.write import write_trace
from lab.tune import schedule
from tests.lab.invoked import figures, refused
from tests.lab.pool import pool_of

POOL = pool_of("{name: least_loaded}", "plain", "head")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng, path = Random(0), tmp_path / "trace.jsonl.zst"
    chat = TraceRecord(workload="chat", temperature=0.0, prompt_tokens=400)
    write_trace(path, [replace(chat, arrived_at=n / 40, output_tokens=rng.randint(60, 200)) for n in range(400)])
    return path


@pytest.mark.slow
def test_it_compares_by_load_and_writes_what_to_set(trace: Path, tmp_path: Path) -> None:
    pool, out = tmp_path / "pool.yaml", tmp_path / "k.yaml"
    pool.write_text(POOL)
    printed, document = figures("tune", tmp_path, trace, "--config", pool, "--out", out, "--schedule")
    played = document["replicas"]["head"]

    def mean_s(name: str, load: float) -> float:
        return float(played[f"{name} at {load:g}"]["mean_s"])

    context = next(name for name in played if name.startswith("adaptive") and "8,192" not in name).split()[3]
    for load in (1.0, 2.0, 4.0):
        long, own = (mean_s(f"adaptive, profiled with {tokens}", load) for tokens in ("8,192", context))
        assert own < 0.97 * long, "every draft is charged the reading of 8,192 tokens"
    assert mean_s("k as it is", 0.25) < 0.8 * mean_s("no speculation", 0.25)
    assert mean_s("k by batch size", 4.0) < mean_s("k as it is", 4.0)
    assert printed.splitlines()[2].startswith("head (eagle3): Set ")
    assert "The first 400 of 400 requests, each way once: what differs little may be chance." in printed
    assert "# head (eagle3): Set " in out.read_text()
    assert "# Step times of plain, head: llama-3.1-8b-h100." in out.read_text()
    written = yaml.safe_load(out.read_text())["backends"]["head"]
    assert written["method"] == "eagle3"
    assert written["speculative_config"]["num_speculative_tokens"] == 3


@pytest.mark.slow
def test_one_k_that_is_best_at_every_batch_size_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "best_schedule", lambda *_: [(1, 256, 1)])
    trace, pool, out = tmp_path / "trace.jsonl", tmp_path / "pool.yaml", tmp_path / "k.yaml"
    write_trace(trace, [TraceRecord(arrived_at=n / 10, prompt_tokens=400, output_tokens=60) for n in range(40)])
    pool.write_text(POOL)
    _, document = figures("tune", tmp_path, trace, "--config", pool, "--out", out, "--schedule")
    assert "k 1 at every batch size at 1" in document["replicas"]["head"]


def test_the_drafting_as_it_is_keeps_its_schedule() -> None:
    config = {"num_speculative_tokens": 3, SCHEDULE_KEY: [[1, 8, 3], [9, 256, 1]]}
    spec = ReplicaSpec("head", Method.EAGLE3, config, "llama-3.1-8b-h100")
    with request_table(
        [TraceRecord(arrived_at=n / 10, prompt_tokens=400, output_tokens=60) for n in range(4)], 0
    ) as table:
        found = schedule.ways(spec, table[:])
    assert found["k as it is"] == spec
    assert not [name for name, one in found.items() if name.startswith("adaptive") and SCHEDULE_KEY in one.config]


def test_without_a_drafting_model_there_is_nothing_to_compare(trace: Path, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL.partition("      head:")[0])
    given = ("tune", trace, "--config", pool, "--out", tmp_path / "k.yaml", "--schedule")
    assert "has no replica that drafts with a model" in refused(*given)
    assert "--objective: is for rules; omit it with --schedule" in refused(*given, "--objective", "p99")
