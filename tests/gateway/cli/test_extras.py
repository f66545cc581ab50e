"""Commands whose optional dependencies are missing say which extra to install, and do nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import extras
from gateway.cli.app import app
from tests.support.paths import CONFIG

EXPORTS = "models: {m: {policy: {name: random}, backends: {a: {url: 'http://127.0.0.1:9'}}}}\ntelemetry: {otlp: {}}\n"


@pytest.mark.parametrize(
    ("missing", "line", "said"),
    [
        ("numba", "replay no.jsonl --config no.yaml", "gateway replay: needs numba: pip install '.[lab]'"),
        ("optuna", "tune no.jsonl --config no.yaml --out o", "gateway tune: needs optuna: pip install '.[lab]'"),
        ("numba", f"--config {CONFIG}/pool.yaml", "gateway: needs numba: pip install '.[simulator]'"),
        ("opentelemetry.sdk", "--config pool.yaml", "gateway: needs opentelemetry.sdk: pip install '.[otel]'"),
    ],
)
def test_a_command_names_its_extra_before_anything_is_read_or_started(
    missing: str, line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str) -> object:
        if name == missing and "." in name:
            raise ModuleNotFoundError(name)  # of its package
        return None if name == missing else found(name)

    monkeypatch.setattr(extras, "find_spec", find_spec)
    monkeypatch.chdir(tmp_path)
    Path("pool.yaml").write_text(EXPORTS)
    result = CliRunner().invoke(app, line.split())
    assert (result.exit_code, result.stderr) == (2, f"{said} in a checkout (deploy/README.md#install)\n")
