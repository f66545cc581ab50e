"""`gateway tune --schedule` on the command line."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.config.load import load_pool
from lab.trace import TraceRecord, write_trace

POOL = """\
models:
  llama: # a model
    policy: {name: least_loaded}
    backends:
      head: # drafts too much
        method: eagle3
        simulate: {calibration: llama-3-70b-2xh200}
        speculative_config: {num_speculative_tokens: 5} # as trained
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("schedule")
    pool, trace = folder / "pool.yaml", folder / "trace.jsonl"
    pool.write_text(POOL)
    lengths = [40 + n * 37 % 80 for n in range(500)]
    records = [
        TraceRecord(arrived_at=0.1 * n, temperature=0.0, workload="chat", prompt_tokens=300, output_tokens=length)
        for n, length in enumerate(lengths)
    ]
    write_trace(trace, records)
    return pool, trace


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["tune", "--schedule", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_schedule_is_written_with_its_gain_at_each_load(files: tuple[Path, Path], tmp_path: Path) -> None:
    pool, trace = files
    out, figures = tmp_path / "out.yaml", tmp_path / "figures.json"
    status, stdout, stderr = run(trace, "--config", pool, "--out", out, "--json", figures)
    assert (status, stderr) == (0, "")
    written = load_pool(out).models["llama"].backends["head"].speculative_config
    assert written is not None
    ranges = written.num_speculative_tokens_per_batch_size
    assert ranges is not None
    assert (ranges[0][0], ranges[-1][1]) == (1, 1024)
    assert written.num_speculative_tokens == ranges[0][2]
    assert ranges[0][2] > ranges[-1][2]
    kept = [line for line in POOL.splitlines() if "num_speculative" not in line]
    assert [line for line in out.read_text().splitlines() if "num_speculative" not in line] == kept
    assert "# as trained" in out.read_text()

    document = orjson.loads(figures.read_bytes())
    loads = {each["load"]: each for each in document["loads"]}
    assert list(loads) == [0.25, 0.5, 0.75, 0.95, 1.1, 1.3]
    at_little, at_most = (loads[load]["gains"] for load in (0.25, 1.3))
    assert at_most[0]["low"] > 0.01
    assert at_little[0]["value"] < at_most[0]["value"]
    assert at_most[1]["value"] != at_most[0]["value"]  # of one k for all
    assert loads[1.3]["seconds"][1] == pytest.approx(loads[1.3]["seconds"][0] * (1 - at_most[0]["value"]))
    assert "The new values save time at" in stdout


def test_a_pool_without_a_method_to_schedule_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL.replace("method: eagle3", "method: ngram"))
    status, _, stderr = run(files[1], "--config", pool, "--out", tmp_path / "out.yaml")
    assert status == 2
    assert "no replica of this pool gains by a schedule" in stderr
    assert "head (ngram): its drafts cost next to nothing" in stderr
    assert not (tmp_path / "out.yaml").exists()


def test_a_trace_and_live_figures_exclude_each_other(files: tuple[Path, Path], tmp_path: Path) -> None:
    for arguments in ((files[1], "--live"), ()):
        status, _, stderr = run(*arguments, "--config", files[0], "--out", tmp_path / "out.yaml")
        assert status == 2
        assert "give a trace, or --schedule --live" in stderr
