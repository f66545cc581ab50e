"""What the autopilot reads of the records, and what it says of its last change, in a dry run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from backends.speculation import Method
from backends.validation import UsageError
from lab.autopilot import traffic
from lab.autopilot.journal import Change, Journal, Speculation, Step
from lab.autopilot.options import AutopilotOptions
from lab.autopilot.run import run_autopilot
from lab.autopilot.traffic import Recorded
from lab.trace import TraceRecord
from lab.trace.write import write_trace

POOL = """
models:
  m:
    policy: {name: least_loaded}
    default_temperature: 0
    backends:
      a: {method: suffix, url: "http://127.0.0.1:1"}
      b: {method: baseline, url: "http://127.0.0.1:2"}
"""
BASELINE, SUFFIX = Speculation(method=Method.BASELINE), Speculation(method=Method.SUFFIX)


def records(start_s: float, hours: float, per_s: float, token_s: float, seed: int) -> list[TraceRecord]:
    rng = np.random.default_rng(seed)
    at_s = start_s + np.sort(rng.uniform(0.0, 3600.0 * hours, round(3600.0 * hours * per_s)))
    noise = np.exp(rng.normal(0.0, 0.3, len(at_s)))
    return [
        TraceRecord(
            arrived_at=float(at), model="m", endpoint="chat", workload="code", temperature=0.0, status=200, stream=True,
            prompt_tokens=100, output_tokens=50, e2e_s=float(52.0 * token_s * factor),
        )
        for at, factor in zip(at_s, noise, strict=True)
    ]  # fmt: skip


def after_a_change(folder: Path, token_s: float, hours_ago: float, pool: str = POOL) -> tuple[int, str, str]:
    """Return status, what is said, and the outcome in the journal, after a change from 10 ms a token."""
    now_s = time.time()
    changed_s = now_s - 3600.0 * hours_ago
    (folder / "records").mkdir()
    (folder / "pool.yaml").write_text(pool)
    kept = records(changed_s - 7200.0, 2.0, 0.2, 0.010, 1) + records(changed_s, hours_ago, 0.2, token_s, 2)
    write_trace(folder / "records" / "requests-1.jsonl.zst", kept)
    step = Step(backend="a", before=BASELINE, after=SUFFIX, done=True)
    change = Change(
        model="m", began_s=changed_s, ended_s=changed_s, steps=[step], gain=0.1, low=0.05, high=0.15, outcome="on trial"
    )
    path = folder / "pool.yaml.autopilot.json"
    Journal(path, [change]).write()
    said: list[str] = []
    options = AutopilotOptions(folder / "pool.yaml", folder / "records", calibration="llama-3.1-8b-h100", jobs=1)
    status = run_autopilot(options, said.append)
    return status, "\n".join(said), Journal.read(path).changes[0].outcome


def test_replicas_that_someone_else_has_changed_are_left_to_them(tmp_path: Path) -> None:
    pool = POOL.replace("method: suffix", "method: ngram, speculative_config: {num_speculative_tokens: 3}")
    status, said, _ = after_a_change(tmp_path, 0.013, 1.5, pool)
    assert (status, "not as the last change left them" in said) == (0, True), said


@pytest.mark.parametrize(
    ("token_s", "hours_ago", "says"),
    [
        (0.013, 1.5, "the last change is undone: 1.2"),
        (0.010, 1.5, "on trial for 2 h"),
        (0.010, 2.5, "the last change is kept"),
    ],
)
def test_a_change_is_judged_by_the_time_before(tmp_path: Path, token_s: float, hours_ago: float, says: str) -> None:
    status, said, outcome = after_a_change(tmp_path, token_s, hours_ago)
    assert (status, says in said) == (0, True), said
    assert outcome == "on trial"  # a dry run notes nothing


def test_records_of_a_long_time_are_planned_on_in_stretches_of_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "_PART", 50)
    many = records(1000.0, 1.0, 0.5, 0.01, 3)
    write_trace(
        tmp_path / "requests-1.jsonl.zst", [*reversed(many[:900]), TraceRecord(arrived_at=1001.0, model="other")]
    )
    write_trace(tmp_path / "requests-2.jsonl.zst", many[900:])
    recorded = Recorded(tmp_path, "m", sample=0.5)
    requests = recorded.requests(1000.0, 4600.0, 4096)
    assert len(requests) == 800
    gaps_s = np.diff([request.arrived_s for request in requests])
    assert (gaps_s >= 0).all()
    assert gaps_s.max() < 10.0  # none between stretches, which would leave the replicas idle
    assert requests[-1].arrived_s - requests[0].arrived_s == pytest.approx(0.5 * 800 * 2.0, rel=0.1)
    assert np.median(gaps_s) == pytest.approx(0.5 * 2.0 * np.log(2), rel=0.2)  # twice the recorded rate
    assert recorded.requests(1000.0, 4600.0, 149) == []
    assert len(recorded.requests(1000.0, 1100.0, 4096)) == sum(
        one.arrived_at < 1100.0 for one in many if one.arrived_at
    )
    assert recorded.rate(4600.0, 300.0) == pytest.approx(1.0, rel=0.3)
    os.utime(tmp_path / "requests-1.jsonl.zst", (1.0, 1.0))  # last written before the period
    assert recorded.requests(1000.0, 4600.0, 4096)[0].arrived_s == 0.5 * (many[900].arrived_at or 0.0)


def test_wrong_input_is_told_before_anything_happens(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(POOL)
    with pytest.raises(UsageError, match="is no folder; name the recorder's"):
        run_autopilot(AutopilotOptions(tmp_path / "pool.yaml", tmp_path / "nowhere", calibration="tiny-cpu"), print)
    with pytest.raises(UsageError, match="--calibration: name the target model and GPU"):
        run_autopilot(AutopilotOptions(tmp_path / "pool.yaml", tmp_path), print)
    wrong = AutopilotOptions(tmp_path / "pool.yaml", tmp_path, calibration="tiny-cpu", apply=True)
    assert run_autopilot(wrong, print) == 0  # no records yet: nothing to do, and no gateway is asked
