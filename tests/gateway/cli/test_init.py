"""`gateway init` writes a pool file that can be served, and never over another file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.config.load import load_pool
from tests.support.paths import ROOT


def test_it_writes_the_default_pool_where_the_gateway_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "Wrote config/pool.yaml: five simulated replicas. Serve them with `gateway --config config/pool.yaml`.\n"
    )
    written, committed = tmp_path / "config/pool.yaml", ROOT / "config/pool.yaml"
    assert load_pool(written) == load_pool(committed)
    assert "schema.json" not in written.read_text()  # which an editor would look for beside it
    assert CliRunner().invoke(app, ["check"]).exit_code == 0


@pytest.mark.parametrize("command", [("init", "--config", "own.yaml"), ("--config", "own.yaml", "init")])
def test_it_writes_no_file_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, command).exit_code == 0
    (tmp_path / "own.yaml").write_text("mine")
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stderr) == (
        2,
        "gateway init: cannot write own.yaml: it exists; give another name with --config\n",
    )
    assert (tmp_path / "own.yaml").read_text() == "mine"


def test_it_says_why_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["init", "--config", str(tmp_path / "file/pool.yaml")])
    assert result.exit_code == 2
    assert result.stderr == (
        f"gateway init: cannot write {tmp_path}/file/pool.yaml: {tmp_path}/file: File exists; "
        "give another name with --config\n"
    )
