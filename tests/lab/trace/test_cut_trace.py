"""A truncated recording: commands read everything before the damage, and report it."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard
from typer.testing import CliRunner

from gateway.cli.app import app
from lab.trace import TraceCandidate, TraceRecord, encode

POOL = """\
models:
  llama:
    policy: {name: thresholds, seed: 1}
    backends:
      tree: {method: suffix, simulate: {calibration: llama-3.1-8b-h100}}
      plain: {method: baseline, simulate: {calibration: llama-3.1-8b-h100}}
"""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A recording whose recorder was killed while writing the third frame."""
    candidates = [TraceCandidate(name, propensity=0.5, in_flight=0) for name in ("tree", "plain")]
    lines = [
        encode(
            TraceRecord(
                arrived_at=0.2 * number, model="llama", prompt_tokens=100, output_tokens=20, backend="tree",
                propensity=0.5, candidates=candidates, status=200, ttft_s=0.1, e2e_s=1.0,
            )
        )
        for number in range(150)
    ]  # fmt: skip
    frames = [zstandard.compress(b"".join(lines[start : start + 50])) for start in (0, 50, 100)]
    path = tmp_path / "requests.jsonl.zst"
    path.write_bytes(b"".join(frames)[: -len(frames[-1]) // 2])
    return path


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (("replay", "--policy", "round_robin"), "100 requests on simulated replicas"),
        (
            ("tune", "--trials", "1", "--out", "rules.yaml"),
            "1 trials on the first 60 requests",
        ),
    ],
    ids=["replay", "tune"],
)
def test_everything_before_the_damage_is_read(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL)
    given = [command[0], str(recording), "--config", str(pool), *command[1:]]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.stderr
    assert output in result.stdout
    assert (
        f"{recording}:101: the file is damaged from here on: it was cut off within a zstd frame; skipped"
        in result.stderr
    )
    assert CliRunner().invoke(app, [*given, "--strict"]).exit_code == 2
